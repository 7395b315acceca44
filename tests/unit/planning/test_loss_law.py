"""The scaling law: fits of made-up runs, its interval and range, and files."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from m6.config.run import load_config
from m6.errors import UserError
from m6.model.counting import num_parameters
from m6.planning.loss.fitting import fit, fit_law
from m6.planning.loss.law import Coefficients, Range, Recipe, Scale, ScalingLaw
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
