"""The scaling law: fits of made-up runs, its interval and range, and files.

The loss that `m6 plan` predicts: its scale, its words, and what days on more devices give.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from m6.cli.plan import app
from m6.config.run import load_config
from m6.errors import UserError
from m6.model.parameters import num_parameters
from m6.planning.loss import (
    Coefficients,
    Range,
    Recipe,
    Scale,
    ScalingLaw,
    days_table,
    fit,
    fit_law,
    learned_by_days,
    loss_line,
    predicted_loss,
    recipe_of,
    shipped_law,
)
from m6.validation import read_model

CONFIGS = Path(__file__).parents[3] / "configs"
TRUTH = Coefficients(floor=1.8, a=1.2, alpha=0.25, gamma=0.3, b=2.5, beta=0.4, kappa=0.7)
SCALES = [
    Scale(parameters, expansion, tokens)
    for parameters in (1e5, 4e5, 1e6, 3e6, 6e6)
    for expansion in (1.0, 2.0, 8.0, 32.0)
    for tokens in (7e5, 1.4e6, 2.8e6, 5.6e6)
]
RECIPE = Recipe(optimizer="Muon", decay="wsd", positions="rotary")
LARGER = Scale(2e7, 8.0, 2e7)


def noisy(spread: float) -> list[float]:
    random = np.random.default_rng(0)
    return [TRUTH.loss(scale) * math.exp(spread * random.standard_normal()) for scale in SCALES]


def test_the_form_of_the_law():
    shortage = 1.2 * (3 * 8**0.3) ** -0.25 + 2.5 * 5**-0.4
    assert TRUTH.loss(Scale(3e6, 8, 5e6)) == pytest.approx(1.8 + shortage**0.7)


def test_the_fit_finds_the_law_of_exact_losses():
    found = fit(SCALES, noisy(0.0))
    for name, value in TRUTH.model_dump().items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


def test_a_single_wrong_run_does_not_bend_the_fit():
    losses = noisy(0.0)
    losses[17] *= 1.5
    # Least squares would miss by 1 % and more; a Huber loss lets the run count linearly.
    assert fit(SCALES, losses).loss(LARGER) == pytest.approx(TRUTH.loss(LARGER), rel=2e-3)


def test_the_interval_holds_the_truth_and_says_what_is_extrapolated():
    law = fit_law(SCALES, noisy(0.005), 0.4, "here", "loss", RECIPE, resamples=20)
    assert law.recipe == RECIPE
    found = law.predict(LARGER)
    assert found.low < TRUTH.loss(LARGER) < found.high
    assert found.loss == pytest.approx(TRUTH.loss(LARGER), rel=0.01)
    assert found.beyond == {"parameters": pytest.approx(2e7 / 6e6), "tokens": pytest.approx(2e7 / 5.6e6)}
    assert law.residual == pytest.approx(0.005, rel=0.3)
    inside = law.predict(SCALES[40])
    assert inside.beyond == {}
    assert inside.high / inside.low < found.high / found.low, "the interval widens beyond the runs"
    assert inside.high / inside.low > math.exp(2 * law.residual), "a single run differs from the law by its noise"
    assert law.beyond(Scale(1e5, 64.0, 1e5)) == {"expansion": 2.0, "tokens": pytest.approx(7.0)}


def test_too_few_runs():
    with pytest.raises(ValueError, match=r"5 runs with 5 losses; a law has 7 coefficients"):
        fit(SCALES[:5], noisy(0.0)[:5])


def test_the_scale_of_a_model():
    model = load_config(CONFIGS / "m6_cpu.json").model
    counts = num_parameters(model)
    scale = Scale.of(model, 9e6)
    blocks = counts["attention"] + counts["norms"] + counts["router"] + counts["experts"] * 2 // 16
    assert scale == Scale(blocks, 8.0, 9e6)
    assert scale.flops == 6 * blocks * 9e6
    # Experts that a capacity leaves out compute nothing: fewer parameters, spread over as many experts.
    half = Scale.of(model, 9e6, experts_per_token=1.0)
    assert half == Scale(blocks - counts["experts"] // 16, 16.0, 9e6)
    dense = load_config(CONFIGS / "m6_cpu.json", ("m6.moe=null",)).model
    assert Scale.of(dense, 1.0).expansion == 1


def law() -> ScalingLaw:
    covered = Range(low=1.0, high=2.0)
    ranges = {"parameters": covered, "expansion": covered, "tokens": covered}
    texts = {"origin": "x", "measure": "y", "recipe": RECIPE}
    return ScalingLaw(**texts, runs=7, **ranges, fill=0.4, fit=TRUTH, resampled=[TRUTH], residual=0.01)


def test_a_law_is_read_as_it_was_written(tmp_path: Path):
    (tmp_path / "law.json").write_text(law().model_dump_json())
    assert read_model(ScalingLaw, tmp_path / "law.json") == law()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fit": TRUTH.model_dump() | {"alpha": -1}}, "fit.alpha"),
        ({"tokens": {"low": 3.0, "high": 2.0}}, "low 3 is above high 2"),
        ({"resampled": []}, "resampled"),
        ({"residuals": 0.1}, "residuals"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, change: dict[str, object], message: str):
    path = tmp_path / "law.json"
    path.write_text(json.dumps(json.loads(law().model_dump_json()) | change))
    with pytest.raises(UserError, match=r"law\.json: ") as error:
        read_model(ScalingLaw, path)
    assert message in str(error.value)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"none\.json: no such file"):
        read_model(ScalingLaw, tmp_path / "none.json")


FIT = Coefficients(floor=1.0, a=2.0, alpha=0.3, gamma=0.2, b=3.0, beta=0.5, kappa=1.0)


def law_up_to(largest: float) -> ScalingLaw:
    """A law_up_to whose runs had from one parameter and token to ``largest`` of both."""
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
    monkeypatch.setattr("m6.planning.loss.shipped_law", lambda: law_up_to(1e15))


def test_the_loss_is_that_of_the_model_and_of_all_its_tokens(known):
    config = load_config(CONFIGS / "papers" / "m6t_base.json", ("train_batch_size=128",))
    tokens = 0.5 * 500 * 128 * config.m6.data.sequence_length
    scale = Scale.of(config.model, tokens, config.expected_routing.experts_per_token)
    assert predicted_loss(config, 500).loss == pytest.approx(FIT.loss(scale))
    assert predicted_loss(config, 500, 1.5).loss == pytest.approx(FIT.loss(Scale.of(config.model, tokens, 1.5)))


def test_choices_that_a_capacity_drops_do_not_learn():
    """Of 80 choices of a token the capacity leaves 1.25."""
    shipped, with_k = (
        predicted_loss(load_config(CONFIGS / "papers" / "m6_10t.json", (f'm6.moe.capacity_rule="{rule}"',)), 50_000)
        for rule in ("1", "k")
    )
    config = load_config(CONFIGS / "papers" / "m6_10t.json")
    assert shipped.loss == pytest.approx(predicted_loss(config, 50_000, 1.25).loss)
    assert with_k.loss < shipped.loss - 0.05
    assert with_k.beyond["parameters"] > 10 * shipped.beyond["parameters"]
    assert shipped.beyond["expansion"] > 10 * with_k.beyond["expansion"]


def test_an_extrapolation_is_marked_with_its_factors(monkeypatch):
    config = load_config(CONFIGS / "papers" / "m6t_base.json")
    monkeypatch.setattr("m6.planning.loss.shipped_law", lambda: law_up_to(1e15))
    assert "extrapolation" not in loss_line(predicted_loss(config, 10), config)
    monkeypatch.setattr("m6.planning.loss.shipped_law", lambda: law_up_to(1e4))
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
        config = load_config(Path(name))
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
        assert recipe_of(load_config(folder / "small.json", rung.overrides())) == shipped_law().recipe


def test_days_on_more_devices_learn_more(known):
    config = load_config(CONFIGS / "papers" / "m6t_base.json")
    curves = learned_by_days(config, {8: 2.0, 16: 1.0}, 8.0)
    assert [days for days, _ in curves[8]] == [1, 2, 4, 8]
    assert dict(curves[8])[8] == pytest.approx(dict(curves[16])[4]), "twice as fast in half the time is the same"
    assert dict(curves[8])[4] == pytest.approx(predicted_loss(config, 4 * 86400 / 2.0).loss)
    assert dict(curves[16])[8] < dict(curves[8])[8]
    table = days_table(curves, 8.0)
    assert "| devices | after 1 days | after 2 days | after 4 days | after 8 days |" in table
    assert f"| 8 | {curves[8][0][1]:.3f} |" in table


def test_days_in_which_no_step_ends(known):
    config = load_config(CONFIGS / "papers" / "m6t_base.json")
    assert learned_by_days(config, {8: 86400.0, 16: 8640000.0}, 1.0) == {8: [(1.0, predicted_loss(config, 1).loss)]}
    with pytest.raises(UserError, match=r"--days 0.5: no step ends within it; the fastest takes 86,400 s"):
        learned_by_days(config, {8: 86400.0}, 0.5)


def test_the_plan_states_the_loss_of_the_shipped_law(tmp_path: Path):
    machine = (str(CONFIGS / "papers" / "m6t_base.json"), "--cluster", "a100_80g_x128", "--set", "train_batch_size=128")
    config = load_config(CONFIGS / "papers" / "m6t_base.json", ("train_batch_size=128",))
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
