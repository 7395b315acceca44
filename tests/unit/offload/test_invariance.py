"""Where the experts lie changes nothing: losses, norms and the whole state are equal to the bit."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import OffloadRuntime, OptimizerSettings, PlacementPlan, SimulatedDevice, solve
from offload.memory.layout import window_bytes
from tests.fixtures.toy_experts import Toy, train_offloaded, train_plainly

# What goes wrong at the end of an activation's life cannot be raised there.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
OPTIMIZERS = {
    "adamw": OptimizerSettings("adamw", weight_decay=0.1),
    "adafactor": OptimizerSettings("adafactor", weight_decay=0.01),
    "sgd": OptimizerSettings("sgd", momentum=0.9),
    "muon": OptimizerSettings("muon", momentum=0.9, weight_decay=0.01, vector_rate=0.5),
}


@st.composite
def toys(draw: st.DrawFn) -> Toy:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    update_in_backward = draw(st.sampled_from([False, False, True]))
    late = None if update_in_backward else draw(st.sampled_from([None, "gradient", "copy"]))
    one_gradient = update_in_backward or late == "gradient"
    at_once = draw(st.sampled_from([1, 1, 2, 3]))
    num_micro_batches = at_once if one_gradient else at_once * draw(st.sampled_from([1, 1, 2]))
    return Toy(
        num_layers=draw(st.integers(1, 4)),
        num_experts=draw(st.integers(1, 6)),
        ffn_hidden_size=draw(st.sampled_from([4, 16, 24])),
        shared=not one_gradient and draw(st.sampled_from([False, False, True])),
        recompute=draw(st.sampled_from(["none", "reentrant", "non_reentrant"])),
        num_micro_batches=num_micro_batches,
        at_once=at_once,
        num_steps=4,
        dtype=dtype,
        gradient_dtype=dtype if one_gradient else draw(st.sampled_from([dtype, torch.float32])),
        optimizer=replace(OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))], masters=draw(st.booleans())),
        clip=not update_in_backward and draw(st.booleans()),
        loss_scale=draw(st.sampled_from([1.0, 128.0])),
        overflow_step=-1 if update_in_backward else draw(st.sampled_from([-1, -1, 0, 2])),
        update_in_backward=update_in_backward,
        late=late,
        activations_on_host=draw(st.sampled_from([frozenset(), frozenset({0, 2}), frozenset(range(4))])),
        seed=draw(st.integers(0, 1000)),
    )


def any_plan(runtime: OffloadRuntime, budget_bytes: int, prefetch_depth: int, seed: int) -> PlacementPlan:
    """A random plan: chunks are owned and kept at random."""
    chance, trace = random.Random(seed), runtime.trace
    room = (
        budget_bytes
        - window_bytes(runtime.sizes, prefetch_depth)
        - sum(max((runtime.sizes[chunk].weight for chunk in moment.pinned), default=0) for moment in trace.moments[:1])
    )
    pinned = max(sum(runtime.sizes[chunk].weight for chunk in moment.pinned) for moment in trace.moments)
    room -= pinned + max(trace.outside_bytes, *(moment.nonmodel_bytes for moment in trace.moments))
    owned = set()
    for chunk in chance.sample(range(len(runtime.sizes)), len(runtime.sizes)):
        if runtime.sizes[chunk].owned <= room and chance.random() < 0.5:
            owned.add(chunk)
            room -= runtime.sizes[chunk].owned
    keep = tuple(chance.random() < 0.5 for _ in trace.moments)
    return PlacementPlan(trace, frozenset(owned), keep, 0, 0, 0.0, prefetch_depth)


def check_invariance(toy: Toy, chunk_bytes: int, spare: float, prefetch_depth: int, plan: str, seed: int) -> None:
    expected = train_plainly(toy) if not toy.shared else train_offloaded(toy, SimulatedDevice(10**9), 10**9)[0]
    chance = random.Random(seed)

    measured, runtime = train_offloaded(replace(toy, num_steps=1), SimulatedDevice(10**9), chunk_bytes)
    moments = runtime.trace.moments
    nonmodel_bytes = [chance.randrange(20_000) for _ in range(len(moments) + 1)]
    total = sum(size.owned for size in runtime.sizes)
    need = max(
        nonmodel_bytes[number] + sum(runtime.sizes[chunk].weight for chunk in moment.pinned)
        for number, moment in enumerate(moments)
    )
    budget = max(nonmodel_bytes) + need + window_bytes(runtime.sizes, prefetch_depth) + int(spare * total)
    device = SimulatedDevice(budget, nonmodel_bytes, seed, eagerness=chance.random())

    def make(runtime: OffloadRuntime) -> PlacementPlan:
        if plan == "solved":
            return solve(runtime.trace, runtime.sizes, budget, prefetch_depth)
        return any_plan(runtime, budget, prefetch_depth, seed)

    outcome, runtime = train_offloaded(toy, device, chunk_bytes, make if plan != "none" else None)
    assert outcome == expected
    assert device.peak_bytes <= budget
    assert measured.losses == expected.losses[:1]
    if plan == "solved":
        assert runtime.statistics.num_misses == 0


CASES = {
    "toy": toys(),
    "chunk_bytes": st.integers(1, 8000),
    "spare": st.floats(0, 1.5),
    "prefetch_depth": st.integers(0, 3),
    "plan": st.sampled_from(["solved", "solved", "any", "none"]),
    "seed": st.integers(0, 10_000),
}
COMMON = {"suppress_health_check": list(HealthCheck)}


@given(**CASES)
@settings(max_examples=20, derandomize=True, **COMMON)
def test_placement_changes_nothing(**case):
    check_invariance(**case)


@pytest.mark.slow
@pytest.mark.nightly
@given(**CASES)
@settings(max_examples=200, **COMMON)
def test_placement_changes_nothing_in_many_cases(**case):
    check_invariance(**case)
