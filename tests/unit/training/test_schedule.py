"""The learning rate against formulas that are written out step by step."""

import itertools
import math

import pytest

from m6.config.sections import ScheduleSettings
from m6.training.train_step import learning_rate_factor


def factors(total_steps: int, **settings: object) -> list[float]:
    schedule = ScheduleSettings(**settings)
    return [learning_rate_factor(step, total_steps, schedule) for step in range(total_steps)]


def slow_factors(
    total: int, warmup: int, decay: str, final: float, decay_share: float | None = None, power: float = 1.0
) -> list[float]:
    """Warm-up first; then the last ``decay_share`` of the steps goes from 1 to ``final`` along the shape."""
    curve = [(step + 1) / warmup for step in range(warmup)]
    length = total - warmup if decay_share is None else max(1, round(decay_share * total))
    curve += [1.0] * (total - warmup - length)
    for number in range(length):
        x = number / (length - 1) if length > 1 else 0.0
        shape = {
            "constant": 1.0,
            "cosine": (1 + math.cos(math.pi * x)) / 2,
            "polynomial": (1 - x) ** power,
            "wsd": 1 - x,
        }[decay]
        curve.append(1.0 if decay == "constant" else final + (1 - final) * shape)
    return curve


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("decay", "extra"),
    [
        ("constant", {}),
        ("cosine", {}),
        ("polynomial", {}),
        ("polynomial", {"power": 2.5}),
        ("wsd", {"decay_share": 0.225}),
        ("wsd", {"decay_share": 0.001}),
    ],
)
def test_every_shape(decay: str, extra: dict, warmup: int, final: float):
    found = factors(40, warmup_steps=warmup, decay=decay, final_lr_ratio=final, **extra)
    assert found == pytest.approx(slow_factors(40, warmup, decay, final, **extra), abs=1e-12)


@pytest.mark.parametrize("decay", ["cosine", "polynomial"])
def test_boundaries(decay: str):
    curve = factors(20, warmup_steps=5, decay=decay, final_lr_ratio=0.1)
    assert curve[0] == pytest.approx(1 / 5), "the first step already learns"
    assert curve[4] == curve[5] == 1.0, "the peak ends the warm-up and begins the decay"
    assert curve[-1] == pytest.approx(0.1), "the last step has the final rate"
    assert all(later <= earlier for earlier, later in itertools.pairwise(curve[5:]))


def test_warmup_of_the_whole_run_and_a_single_step():
    assert factors(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert factors(1) == [1.0]
    assert factors(2, final_lr_ratio=0.0) == [1.0, 0.0]


def test_wsd_is_stable_in_the_middle():
    curve = factors(100, warmup_steps=10, decay="wsd", decay_share=0.2, final_lr_ratio=0.0)
    assert set(curve[9:81]) == {1.0}
    assert curve[-1] == 0.0
    assert curve[90] == pytest.approx(1 - 10 / 19)
