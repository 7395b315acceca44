"""The loss that `m6 plan` predicts: its scale, its words, and what days on more devices give."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from m6.cli.plan import app
from m6.config.run import load_config
from m6.errors import UserError
from m6.planning.loss import outlook
from m6.planning.loss.law import Coefficients, Range, Recipe, Scale, ScalingLaw
from m6.planning.loss.outlook import days_table, learned_by_days, loss_line, predicted_loss, recipe_of

CONFIGS = Path(__file__).parents[3] / "configs"
FIT = Coefficients(floor=1.0, a=2.0, alpha=0.3, gamma=0.2, b=3.0, beta=0.5, kappa=1.0)


def law(largest: float) -> ScalingLaw:
    """A law whose runs had from one parameter and token to ``largest`` of both."""
    covered = Range(low=1, high=largest)
    return ScalingLaw(
        origin="here",
        measure="loss",
        recipe=Recipe(optimizer="Muon", decay="wsd", positions="rotary"),
        runs=7,
        parameters=covered,
        expansion=Range(low=1, high=1e6),
        tokens=covered,
        fill=0.5,
        fit=FIT,
        resampled=[FIT],
        residual=0.01,
    )


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(outlook, "shipped_law", lambda: law(1e15))


def test_the_loss_is_that_of_the_model_and_of_all_its_tokens(known):
    config = load_config(CONFIGS / "m6_base.json", ("train_batch_size=128",))
    tokens = 0.5 * 500 * 128 * config.m6.data.sequence_length
    scale = Scale.of(config.model, tokens, config.expected_routing.experts_per_token)
    assert predicted_loss(config, 500).loss == pytest.approx(FIT.loss(scale))
    assert predicted_loss(config, 500, 1.5).loss == pytest.approx(FIT.loss(Scale.of(config.model, tokens, 1.5)))


def test_choices_that_a_capacity_drops_do_not_learn():
    """Of 80 choices of a token the capacity leaves 1.25."""
    shipped, with_k = (
        predicted_loss(load_config(CONFIGS / "m6_10t.json", (f'm6.moe.capacity_rule="{rule}"',)), 50_000)
        for rule in ("1", "k")
    )
    config = load_config(CONFIGS / "m6_10t.json")
    assert shipped.loss == pytest.approx(predicted_loss(config, 50_000, 1.25).loss)
    assert with_k.loss < shipped.loss - 0.05
    assert with_k.beyond["parameters"] > 10 * shipped.beyond["parameters"]
    assert shipped.beyond["expansion"] > 10 * with_k.beyond["expansion"]


def test_an_extrapolation_is_marked_with_its_factors(monkeypatch):
    config = load_config(CONFIGS / "m6_base.json")
    monkeypatch.setattr(outlook, "shipped_law", lambda: law(1e15))
    assert "extrapolation" not in loss_line(predicted_loss(config, 10), config)
    monkeypatch.setattr(outlook, "shipped_law", lambda: law(1e4))
    prediction = predicted_loss(config, 10)
    line = loss_line(prediction, config)
    factor = 0.5 * 10 * config.deepspeed.train_batch_size * config.m6.data.sequence_length / 1e4
    assert prediction.beyond["tokens"] == pytest.approx(factor)
    assert "**extrapolation** beyond the 7 runs of here: parameters " in line
    assert f"parameters {prediction.beyond['parameters']:,.0f} times, " in line
    assert f"tokens {factor:,.0f} times" in line


def test_the_recipe_of_the_law_is_named_and_that_of_the_run_where_they_differ():
    law_of = "Muon, wsd and rotary positions"
    for name, own in {"m6_10t": "AdamW (Adafactor for experts), cosine and learned positions", "m6_cpu": None}.items():
        config = load_config(CONFIGS / f"{name}.json")
        line = loss_line(predicted_loss(config, 10), config)
        assert law_of in line
        assert ("which are not this run's" in line) == (own is not None)
        assert own is None or f"({own})" in line


def test_the_law_was_fitted_to_runs_of_the_recipe_that_it_names():
    folder = CONFIGS.parent / "scripts" / "experiments" / "recipe"
    sys.path.insert(0, str(folder))
    try:
        from ladder import rungs
    finally:
        sys.path.remove(str(folder))
    for rung in rungs():
        assert recipe_of(load_config(folder / "small.json", rung.overrides())) == outlook.shipped_law().recipe


def test_days_on_more_devices_learn_more(known):
    config = load_config(CONFIGS / "m6_base.json")
    curves = learned_by_days(config, {8: 2.0, 16: 1.0}, 8.0)
    assert [days for days, _ in curves[8]] == [1, 2, 4, 8]
    assert dict(curves[8])[8] == pytest.approx(dict(curves[16])[4]), "twice as fast in half the time is the same"
    assert dict(curves[8])[4] == pytest.approx(predicted_loss(config, 4 * 86400 / 2.0).loss)
    assert dict(curves[16])[8] < dict(curves[8])[8]
    table = days_table(curves, 8.0)
    assert "| devices | after 1 days | after 2 days | after 4 days | after 8 days |" in table
    assert f"| 8 | {curves[8][0][1]:.3f} |" in table


def test_days_in_which_no_step_ends(known):
    config = load_config(CONFIGS / "m6_base.json")
    assert learned_by_days(config, {8: 86400.0, 16: 8640000.0}, 1.0) == {8: [(1.0, predicted_loss(config, 1).loss)]}
    with pytest.raises(UserError, match=r"--days 0.5: no step ends within it; the fastest takes 86,400 s"):
        learned_by_days(config, {8: 86400.0}, 0.5)


def test_the_plan_states_the_loss_of_the_shipped_law(tmp_path: Path):
    machine = (str(CONFIGS / "m6_base.json"), "--cluster", "a100_80g_x128", "--set", "train_batch_size=128")
    config = load_config(CONFIGS / "m6_base.json", ("train_batch_size=128",))
    expected = predicted_loss(config, config.m6.training.total_steps)

    def run(*arguments: str) -> str:
        return CliRunner().invoke(app, [*arguments], catch_exceptions=False).stdout

    text = run(*machine, "--world", "8")
    assert loss_line(expected, config) in text
    assert "Experts that compute a token of a sparse layer: 2 of 2 that it chooses" in text
    assert "0.0% of the tokens have no expert in a layer (m6.moe.capacity_factor 1.25" in text
    booked = json.loads(run(*machine, "--world", "8", "--json"))
    assert booked["stages"][0]["experts_per_token"] == pytest.approx(2, rel=1e-3)
    found = booked["loss"]
    assert found["loss"] == pytest.approx(expected.loss)
    assert found["range"][0] < found["loss"] < found["range"][1]
    assert found["extrapolated"] == pytest.approx(expected.beyond)
    cheap = [option for name in ("zero_stage=2", "tp_size=1", "pp_size=1") for option in ("--force", name)]
    png = tmp_path / "losses.png"
    text = run("frontier", *machine, *cheap, "--days", "2", "--out", str(png))
    assert "| devices | after 0.25 days |" in text
    assert "After 2 days on the fastest: Predicted " in text
    assert png.stat().st_size > 0
