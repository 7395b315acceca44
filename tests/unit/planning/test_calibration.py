"""What a calibration measures between ranks, and what it keeps of the profile before.

Scores and fitted factors.
"""

import random
from typing import Any

import pytest
import torch

from m6.planning.machine import calibration
from m6.planning.machine.calibration import calibrate, fit_factors, fit_memory, kendall_tau, regret
from m6.planning.machine.profile import STEP_PARTS, CollectivePoint, Profile

CPU = torch.device("cpu")
OLD = CollectivePoint(kind="all_reduce", tier="device", ranks=2, num_bytes=1024, seconds=1.0)
FITTED = Profile(
    calibrated=True,
    factors={"matmul": 1.5, "reduction": 2.0},
    activation_factor=0.8,
    checkpoint_bytes_per_s=1e9,
    collectives=[OLD],
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed or sent: every operation takes a millisecond."""
    monkeypatch.setattr(calibration, "_seconds", lambda *_, **__: 1e-3)
    monkeypatch.setattr(calibration, "_matmuls", lambda *_: [])
    monkeypatch.setattr(calibration, "_grouped", lambda *_: [])


def among(world: int, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Profile:
    """The calibration of a rank of so many."""
    with monkeypatch.context() as patch:
        patch.setattr(calibration.dist, "is_initialized", lambda: True)
        patch.setattr(calibration.dist, "get_world_size", lambda: world)
        patch.setattr(calibration.dist, "all_reduce", lambda *_: None)
        return calibrate(CPU, {}, **arguments)


def test_the_smallest_messages_of_many_ranks(monkeypatch: pytest.MonkeyPatch):
    """A kilobyte has fewer elements than there are ranks: each sends one."""
    points = among(300, monkeypatch).collectives
    assert min(point.num_bytes for point in points) == 4 * 300
    assert all(point.num_bytes % (4 * 300) == 0 for point in points)


def test_ranks_on_several_nodes_use_the_network(monkeypatch: pytest.MonkeyPatch):
    """Also where the launcher does not say how many ranks share a node, as srun without --ntasks-per-node."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for nodes, tier in ((["a"] * 4, "device"), (["a", "a", "b", "b"], "network")):
        assert {point.tier for point in among(4, monkeypatch, nodes=nodes).collectives} == {tier}


def test_factors_are_dropped_with_the_rates_that_they_were_fitted_to(monkeypatch: pytest.MonkeyPatch):
    alone = calibrate(CPU, {}, FITTED)
    assert alone.factors == {}
    assert (alone.activation_factor, alone.checkpoint_bytes_per_s) == (0.8, 1e9)
    assert alone.collectives == [OLD]
    together = among(4, monkeypatch, previous=FITTED)
    assert together.factors == {"matmul": 1.5}, "products are those of one process"
    assert together.activation_factor == 0.8
    assert {point.ranks for point in together.collectives} == {2, 4}


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
