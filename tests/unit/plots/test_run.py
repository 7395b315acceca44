"""The curves are drawn, and from the right numbers."""

import json
import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from m6.errors import UserError
from m6.plots.run import plot_run, smoothed
from tests.fixtures.fabricated_run import training_entry, write_metrics


@pytest.fixture
def drawn(monkeypatch):
    """What is plotted, as (panel title, x, y)."""
    lines = []
    plot = Axes.plot

    def spy(axes, *arguments, **options):
        if len(arguments) > 1:
            lines.append((list(arguments[0]), list(arguments[1])))
        return plot(axes, *arguments, **options)

    monkeypatch.setattr(Axes, "plot", spy)
    return lines


def experts(value: float) -> dict:
    keys = ("load_cv", "dropped_fraction", "unused_experts", "router_entropy")
    return {"experts": {key: [value, 2 * value] for key in keys}}


def test_everything_is_drawn(tmp_path, drawn):
    entries = [
        training_entry(s, {"text_denoising": 9 - s / 10, "image_captioning": 5.0}, grad_norm=s, **experts(0.1 * s))
        for s in (10, 20, 30)
    ]
    entries[1]["grad_norm"] = math.inf
    entries.append({"step": 30, "time": 0.0, "validation": {"text_denoising": 6.5}})
    write_metrics(tmp_path, entries)
    losses = {"text_denoising": {"unigram": 8.0, "5-gram": 5.0}}
    (tmp_path / "baselines.json").write_text(json.dumps({"made_from": {}, "losses": losses}))
    out = plot_run(tmp_path)
    assert out == tmp_path / "curves.png"
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert picture.width > 1500
        assert np.asarray(picture.convert("L")).std() > 5
    assert ([10, 20, 30], [8.0, 7.0, 6.0]) in drawn
    assert ([30], [6.5]) in [([*x], [*y]) for x, y in drawn]
    assert ([10, 20, 30], [1.0, 2.0, 3.0]) in drawn, "load of the experts in the first sparse layer"
    assert ([10, 20, 30], [2.0, 4.0, 6.0]) in drawn
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_noise_scale_is_that_of_the_second_half_so_far(tmp_path, drawn):
    estimates = [(2.0, 20.0), (1.0, 30.0), (-5.0, 50.0), (7.0, 10.0)]
    noise = [{"gradient_noise": {"squared_gradient": g, "variance": s}} for g, s in estimates]
    entries = [training_entry(step, {"language_modelling": 9.0}, **own) for step, own in enumerate(noise, 1)]
    write_metrics(tmp_path, entries)
    plot_run(tmp_path)
    (values,) = [y for x, y in drawn if x == [1, 2, 3, 4] and y[0] == 10.0]
    assert values[:2] == [10.0, 30.0]
    assert math.isnan(values[2]), "its estimates of the gradient add up to less than nothing"
    assert values[3] == 30.0


def test_a_dense_run_of_one_line(tmp_path):
    write_metrics(tmp_path, [training_entry(1, {"language_modelling": 9.0})])
    out = plot_run(tmp_path, tmp_path / "elsewhere" / "picture.png")
    assert out == tmp_path / "elsewhere" / "picture.png"
    with Image.open(out) as picture:
        assert picture.height < picture.width


def test_nothing_to_draw(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        plot_run(tmp_path)
    write_metrics(tmp_path, [{"step": 1, "time": 0.0, "validation": {}}])
    with pytest.raises(UserError, match="no training metrics"):
        plot_run(tmp_path)


def test_smoothing():
    values = np.arange(100.0)
    np.testing.assert_allclose(smoothed(values)[10:-10], values[10:-10])  # a centred mean does not lag
    assert smoothed([1.0, math.inf, 3.0]).tolist()[::2] == [1.0, 3.0]
    with_gap = values.copy()
    with_gap[50] = math.nan
    assert np.isfinite(smoothed(with_gap)).all()
    assert smoothed([math.nan]).shape == (1,)
    assert smoothed([]).shape == (0,)  # of a run that was never finite


def test_the_switch_is_marked_on_every_clock(tmp_path, drawn, monkeypatch):
    marks = []
    monkeypatch.setattr(Axes, "axvline", lambda axes, at, **options: marks.append(at))
    entries = []
    for step, name, switch in ((10, "pseudo", None), (20, "pseudo", 20), (30, "real", 20)):
        stage = {"name": name, "switch_step": switch, "state_bytes": 1 << 30, "gradient_correlation": [0.5, 0.7]}
        if name == "real":
            stage["layer_divergence"] = [0.1, 0.3]
        losses = {"language_modelling": 9.0 - step / 10}
        entry = training_entry(step, losses, loss=9.0 - step / 10, tokens_seen=100 * step, step_time_s=6.0)
        entries.append({**entry, "stage": stage})
    write_metrics(tmp_path, entries)
    plot_run(tmp_path)
    assert marks[:3] == [20, 2000, 2.0], "steps, tokens, minutes of steps"
    assert marks[3:] == [20, 20], "of correlation and divergence"
    drawn_lists = [([*x], [*y]) for x, y in drawn]
    for pseudo, real in (([10, 20], [30]), ([1000, 2000], [3000]), ([1.0, 2.0], [3.0])):
        assert (pseudo, [8.0, 7.0]) in drawn_lists
        assert (real, [6.0]) in drawn_lists
    assert ([30], [0.2]) in drawn_lists
