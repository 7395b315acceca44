"""The report of Pseudo-to-Real holds the run that never switches, from the committed results."""

import csv
from pathlib import Path

import pytest

from scripts.experiments.pseudo_to_real import report

PAGE = report.HERE / "README.md"


@pytest.fixture(scope="module")
def runs() -> list[report.Run]:
    return report.read_runs()


def rows(table: str) -> dict[tuple[str, str], list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {(line[0], line[1]): line[2:] for line in lines}


def test_a_run_before_its_switch_is_one_that_never_switches(runs: list[report.Run]):
    for run in runs:
        if run.change == "long Pseudo":
            alone = run.before_switch()
            assert alone.steps[-1] == run.switch == 450 < run.steps[-1] == 600
            assert alone.cost(450, 4.4) == 450, "no Real step"
            assert len(run.steps) == len(run.losses) > len(alone.losses), "the run itself is as it was"


def test_the_page_begins_with_never_switching(runs: list[report.Run]):
    """Its numbers are those of results.csv, and the page has the table that the report prints."""
    table = report.never_switching(runs)
    assert table in PAGE.read_text(encoding="utf-8")
    found = rows(table)
    with (Path(report.HERE) / "results.csv").open(encoding="utf-8", newline="") as file:
        losses = {(row["run"], row["seed"], row["step"]): float(row["validation_loss"]) for row in csv.DictReader(file)}
    for title, recipe in (("the recipe", "recipe: "), ("AdamW, cosine", "")):
        alone = [f"{losses[f'{recipe}long Pseudo', seed, '450']:.3f}" for seed in "012"]
        assert found[title, "long Pseudo, before its switch"] == ["450", "0", "450", *alone]
        real = [f"{losses[f'{recipe}real', seed, '300']:.3f}" for seed in "012"]
        assert found[title, "real"] == ["0", "300", "1,320", *real]
    assert found["the recipe", "switch 75 %"][:3] == ["225", "75", "555"]


def test_never_switching_is_lower_at_less_cost(runs: list[report.Run]):
    """What the page says of each seed; it would have to be written anew if other results were committed."""
    of = {(run.name, run.seed): run for run in runs}
    for seed in report.SEEDS:
        real, switched = of["recipe: real", seed], of["recipe: switch 75 %", seed]
        for alone in (of["recipe: long Pseudo", seed].before_switch(), of["recipe: Pseudo alone", seed]):
            assert alone.losses[-1] < switched.losses[-1]
            assert alone.cost(alone.steps[-1], 4.4) < switched.cost(switched.steps[-1], 4.4)
            assert report.speed_up(alone, real, 4.4) > report.speed_up(switched, real, 4.4)
        assert of["recipe: Pseudo alone", seed].losses[-1] < real.losses[-1]
