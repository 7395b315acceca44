"""Whether a shipped configuration is one function in training, in evaluation and in generation with a cache."""

from pathlib import Path

import pytest

from m6.config.run import load_config
from m6.planning.routed import CONFIGURATIONS, Routed, all_three, routed
from m6.shipped import CONFIGS
from tests.fixtures.pages import ROOT

SECTION = "### What a capacity leaves of a token"
PAGE = (ROOT / "docs" / "guides" / "moe.md").read_text(encoding="utf-8").partition(SECTION)[2].partition("\n### ")[0]
TABLE = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| m6")]
# The list is to become empty, and not to grow.
DIFFERS = {"m6_10t"}


def test_the_page_has_every_configuration_and_those_that_differ():
    assert [row[0] for row in TABLE] == list(CONFIGURATIONS)
    shipped = {path.stem for folder in (".", "papers") for path in (CONFIGS / folder).glob("m6*.json")}
    assert shipped == set(CONFIGURATIONS)
    assert {row[0] for row in TABLE if row[-1] != "yes"} == DIFFERS


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_training_evaluation_and_generation(row: list[str]):
    """The figures of the page, and whether they agree. 3 %: products in another order choose other experts here and
    there."""
    name, chosen, *cells, _ = row
    config = load_config(Path(name))
    training, evaluation, alone = found = all_three(config)
    assert config.model.moe_config().experts_per_token == int(chosen)
    experts, without, gates = cells[:3], cells[3:5], cells[5:]
    assert [each.experts for each in found] == pytest.approx([float(cell) for cell in experts], rel=0.03)
    shares = [float(cell.rstrip("%")) / 100 for cell in without]
    assert [training.without, evaluation.without] == pytest.approx(shares, abs=0.01)
    assert [each.gates for each in found] == pytest.approx([float(cell) for cell in gates], rel=0.03)
    assert alone.without == 0
    assert (training.agrees(evaluation) and training.agrees(alone)) == (name not in DIFFERS)


def test_figures_agree_within_a_tenth():
    one = Routed(2.0, 0.0, 0.5)
    assert one.agrees(Routed(1.81, 0.5, 0.55))
    assert not one.agrees(Routed(1.79, 0.0, 0.5))
    assert not one.agrees(Routed(2.0, 0.0, 0.56))


def test_a_capacity_of_the_training_alone_is_seen():
    config = load_config(CONFIGS / "m6_smoke.json", ("m6.moe.capacity_factor=0.5",))
    training, evaluation, alone = (routed(config, 512, *how) for how in ((True,), (False,), (False, True)))
    assert training.experts == pytest.approx(2, rel=0.02)
    assert 0.05 < training.without < 1
    assert (evaluation.experts, evaluation.without, alone.experts) == (4, 0, 4)
    assert training.gates < 0.6 * evaluation.gates
    assert not training.agrees(evaluation)
