"""Scores and fitted factors."""

import random

import pytest

from m6.planning.machine.fitting import fit_factors, fit_memory, kendall_tau, regret
from m6.planning.machine.profile import STEP_PARTS


def test_scores():
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([4, 3, 2, 1], [10, 20, 30, 40]) == -1
    assert kendall_tau([1, 3, 2], [1, 2, 3]) == pytest.approx(1 / 3)
    assert regret([1.0, 2.0], [3.0, 2.0]) == pytest.approx(0.5)
    assert regret([2.0, 1.0], [3.0, 2.0]) == 0


def test_factors_are_found_again():
    generator = random.Random(0)
    truth = {"matmul": 1.7, "experts": 0.6, "exchange": 3.0}
    runs = [{part: generator.random() for part in (*truth, "bubble")} for _ in range(200)]
    measured = [sum(value * truth.get(part, 1.0) for part, value in run.items()) for run in runs]
    found = fit_factors(runs, measured)
    # The pull to 1 keeps a few percent back.
    assert {part: found[part] for part in truth} == pytest.approx(truth, rel=0.1)  # type: ignore[index]
    assert all(found[part] == pytest.approx(1) for part in STEP_PARTS if part not in truth)


def test_memory_of_the_process_is_found_again():
    generator = random.Random(1)
    states, activations = ([generator.uniform(1e8, 2e9) for _ in range(30)] for _ in range(2))
    measured = [8e8 + s + 0.7 * a for s, a in zip(states, activations, strict=True)]
    constant, factor = fit_memory(states, activations, measured, 5e8)
    # The pull to what was calibrated keeps a little back.
    assert (constant, factor) == pytest.approx((8e8, 0.7), rel=0.02)
    assert fit_memory([], [], [], 5e8) == pytest.approx((5e8, 1.0))
