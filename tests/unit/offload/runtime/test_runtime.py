"""What can go wrong, and what must stay as it is over many steps."""

import gc
import math
from dataclasses import replace

import pytest
import torch

import offload.runtime.slots
from offload import (
    DryRuntime,
    OffloadRuntime,
    OptimizerSettings,
    PlacementPlan,
    SimulatedDevice,
    StorageMeter,
    StreamedExperts,
    solve,
)
from offload.runtime.slots import Slot
from offload.runtime.updates import GradientSums
from offload.runtime.workers import WorkerFailure
from tests.fixtures.toy_experts import OffloadedRun, Toy, compute, train_offloaded, train_plainly

TOY = Toy()
CHUNK_BYTES = 2 * 2 * 8 * 16 * 4  # two experts of two fp32 matrices


def test_uses_that_are_not_in_the_plan_are_counted():
    """A step that uses the layers in another order than the traced one is slower, and its results are the same."""
    run = OffloadedRun(TOY, SimulatedDevice(60_000), CHUNK_BYTES)
    run.step(0)
    run.runtime.adopt(solve(run.runtime.trace, run.runtime.sizes, 60_000))
    run.layers.reverse()
    run.step(1)
    run.layers.reverse()
    run.step(2)
    assert run.runtime.statistics.num_misses > 0

    same = OffloadedRun(TOY, SimulatedDevice(10**9), 10**9)
    for number in range(3):
        same.layers.reverse() if number else None
        same.step(number)
    assert run.finish() == same.finish()


def test_validation_between_steps_changes_nothing():
    run = OffloadedRun(TOY, SimulatedDevice(60_000), CHUNK_BYTES)
    for number in range(TOY.num_steps):
        run.step(number)
        if number == 0:
            run.runtime.adopt(solve(run.runtime.trace, run.runtime.sizes, 60_000))
        with run.runtime.evaluating(), torch.no_grad():
            TOY.loss(run.layers, 100, 0)
    assert run.runtime.statistics.num_misses == 0
    assert run.finish() == train_plainly(TOY)


def test_moved_bytes_are_those_of_the_plan():
    budget = 60_000
    device = SimulatedDevice(budget)
    run = OffloadedRun(TOY, device, CHUNK_BYTES)
    run.step(0)
    plan = solve(run.runtime.trace, run.runtime.sizes, budget)
    run.runtime.adopt(plan)
    assert 0 < len(plan.owned) < len(run.runtime.sizes)
    before = device.uploaded_bytes, device.downloaded_bytes
    run.step(1)
    assert device.uploaded_bytes - before[0] == plan.upload_bytes
    assert device.downloaded_bytes - before[1] == plan.download_bytes
    assert run.runtime.statistics.num_evictions == 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_uploads_start_as_many_uses_ahead_as_planned(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward pass, where no update can be late, exactly the chunks of the next uses are on the device."""
    run = OffloadedRun(TOY, SimulatedDevice(10**9), CHUNK_BYTES)
    run.step(0)
    plan = solve(run.runtime.trace, run.runtime.sizes, 10**9)
    moments = plan.trace.moments
    nothing_stays = replace(plan, owned=frozenset(), keep=(False,) * len(moments), prefetch_depth=depth)
    run.runtime.adopt(nothing_stays)
    cache, checked = run.runtime._weights, []
    pin = cache.pin

    def watched(slot: Slot, backward: bool) -> None:
        pin(slot, backward)
        if backward:
            present = {other.number for other in cache._slots if other.replica.present}
            assert present == {moment.chunk for moment in moments[slot.last_use : slot.last_use + 1 + depth]}
            checked.append(slot.number)

    monkeypatch.setattr(cache, "pin", watched)
    run.step(1)
    assert checked == [moment.chunk for moment in moments if moment.backward]


def test_resume_with_another_budget_and_chunk_size():
    """Values read from one runtime and written into another: the training goes on to the bit."""
    toy = replace(TOY, num_steps=6, dtype=torch.bfloat16)
    first = OffloadedRun(toy, SimulatedDevice(60_000), CHUNK_BYTES)
    for number in range(3):
        first.step(number)
        if number == 0:
            first.runtime.adopt(solve(first.runtime.trace, first.runtime.sizes, 60_000))
    second = OffloadedRun(toy, SimulatedDevice(12_000), 1)
    second.runtime.num_updates = first.runtime.num_updates
    for stack in toy.stacks:
        for kind in first.runtime.kinds:
            second.runtime.write(kind, stack.name, first.runtime.read(kind, stack.name))
    for number in range(3, 6):
        second.step(number)
    second.outcome.losses = first.outcome.losses + second.outcome.losses
    second.outcome.norms = first.outcome.norms + second.outcome.norms
    assert second.finish() == train_plainly(toy)


def test_write_refuses_other_shapes():
    run = OffloadedRun(TOY, SimulatedDevice(60_000), CHUNK_BYTES)
    values = run.runtime.read("weight", "layer_0")
    with pytest.raises(ValueError, match=r"weight of layer_0.w_out: expected the shape \(6, 8, 16\), found None"):
        run.runtime.write("weight", "layer_0", {"w_in": values["w_in"]})


def test_too_small_budgets_are_errors():
    with pytest.raises(ValueError, match=r"device's budget of 0.001 MiB is too small.* is 0.0059 MiB"):
        OffloadedRun(TOY, SimulatedDevice(1000), CHUNK_BYTES)
    settings = {"dtype": torch.float32, "chunk_bytes": CHUNK_BYTES}
    with pytest.raises(ValueError, match=r"host's budget of 0.0001 MiB is too small: the experts need 0.0743 MiB"):
        OffloadRuntime(TOY.stacks, SimulatedDevice(60_000), OptimizerSettings(), host_budget_bytes=5, **settings)


def test_host_bytes_by_hand():
    """12 bytes a parameter with AdamW and a split master, 4 with Adafactor, each with 2 more where gradients are kept.

    Rows and columns of the second moments, alignment and the two landings come on top.
    """
    stacks = replace(TOY, num_layers=40, hidden_size=128, ffn_hidden_size=256).stacks
    for settings, in_backward, expected in (
        (OptimizerSettings("adamw"), False, 14.0),
        (OptimizerSettings("adafactor"), False, 6.05),
        (OptimizerSettings("adamw"), True, 12.0),
        (OptimizerSettings("adafactor"), True, 4.05),
        (OptimizerSettings("adamw", masters=False), True, 10.0),
    ):
        device = SimulatedDevice(10**9)
        runtime = OffloadRuntime(
            stacks, device, settings, dtype=torch.bfloat16, chunk_bytes=10**5, update_in_backward=in_backward
        )
        parameters = sum(stack.num_experts * stack.expert_size for stack in stacks)
        assert runtime.host_bytes / parameters == pytest.approx(expected, rel=0.015)
        assert device.pinned_bytes == runtime.host_bytes
        runtime.close()


def test_a_failure_in_a_thread_is_raised_at_the_next_use(monkeypatch: pytest.MonkeyPatch):
    """The failure shows at the next use of the chunk, and reading the state, half updated, fails too."""
    run = OffloadedRun(TOY, SimulatedDevice(60_000), CHUNK_BYTES)
    run.step(0)
    run.runtime.drain()

    def fail(*arguments: object) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(offload.runtime.slots, "update", fail)
    run.step(1)
    with pytest.raises(WorkerFailure, match="no memory left"):
        run.step(2)
    with pytest.raises(WorkerFailure, match="no memory left"):
        run.runtime.read("weight", "layer_0")


def test_several_threads_compute_the_same():
    run = OffloadedRun(TOY, SimulatedDevice(60_000), CHUNK_BYTES, num_threads=3)
    for number in range(TOY.num_steps):
        run.step(number)
    assert run.finish() == train_plainly(TOY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_may_leave_the_store_and_come_back(dtype: torch.dtype):
    """From chunks on the host and, after the first step, from some that the device owns."""
    toy = replace(TOY, num_micro_batches=2, dtype=dtype, gradient_dtype=torch.float32)
    run = OffloadedRun(toy, SimulatedDevice(200_000), CHUNK_BYTES)
    runtime, square = run.runtime, run.runtime.sum_of_squares

    def by_the_caller() -> float:
        gradients = runtime.take_gradients()
        assert any(gradient.any() for gradient in gradients)
        assert not any(gradient.any() for gradient in runtime.take_gradients()), "they have left"
        runtime.put_gradients(gradients)
        return square()

    runtime.sum_of_squares = by_the_caller
    for number in range(toy.num_steps):
        run.step(number)
        if number == 0:
            runtime.adopt(
                PlacementPlan(runtime.trace, frozenset({0, 2}), (True,) * len(runtime.trace.moments), 0, 0, 0.0, 1)
            )
    assert run.finish() == train_plainly(toy)


def test_infinite_gradients_are_reported_and_skipped():
    toy = replace(TOY, overflow_step=1)
    outcome, _ = train_offloaded(toy, SimulatedDevice(60_000), CHUNK_BYTES)
    assert outcome.norms[1] == math.inf
    assert outcome == train_plainly(toy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "adafactor", "sgd", "muon"])
@pytest.mark.parametrize("plan", [False, True])
def test_updates_in_the_backward_pass_give_the_same_results(dtype: torch.dtype, kind: str, plan: bool):
    """Without clipping an expert's update depends on no other gradient, so that nothing shows when it happens."""
    toy = replace(TOY, dtype=dtype, gradient_dtype=dtype, clip=False, optimizer=OptimizerSettings(kind))
    early = replace(toy, update_in_backward=True)

    def make(runtime: OffloadRuntime) -> PlacementPlan:
        return solve(runtime.trace, runtime.sizes, 40_000)

    outcome, runtime = train_offloaded(early, SimulatedDevice(40_000), CHUNK_BYTES, make if plan else None)
    assert outcome == train_plainly(toy)
    if plan:
        assert runtime.plan is not None
        assert runtime.plan.owned


def test_a_second_gradient_after_an_update_in_the_backward_pass_is_an_error():
    toy = replace(TOY, update_in_backward=True, clip=False, num_micro_batches=2)
    run = OffloadedRun(toy, SimulatedDevice(60_000), CHUNK_BYTES)
    with pytest.raises(RuntimeError, match=r"a second gradient of chunk .* of layer_2 in a step, after its update"):
        run.step(0)


def test_a_plan_before_the_first_step():
    """Owned chunks never take memory on the host, and the results are those of any other plan."""
    first = OffloadedRun(TOY, SimulatedDevice(60_000), CHUNK_BYTES)
    everything = first.runtime.host_bytes
    first.step(0)
    plan = solve(first.runtime.trace, first.runtime.sizes, 60_000)
    device = SimulatedDevice(60_000)
    second = OffloadedRun(TOY, device, CHUNK_BYTES, plan=plan)
    owned = sum(second.runtime.sizes[number].owned for number in plan.owned)
    assert owned > 0
    assert second.runtime.host_bytes == everything - owned
    assert device.pinned_bytes == second.runtime.host_bytes
    assert device.used_bytes == owned
    for number in range(TOY.num_steps):
        second.step(number)
    assert second.runtime.statistics.num_misses == 0
    assert second.finish() == train_plainly(TOY)


def test_pageable_memory_gives_the_same_results():
    fast = SimulatedDevice(60_000, latency_s=0.0)
    slow = SimulatedDevice(60_000, latency_s=0.0, pinnable_bytes=40_000)
    runs = [OffloadedRun(TOY, fast, CHUNK_BYTES)]
    with pytest.warns(UserWarning, match="could not be pinned.*the limit is 40,000 bytes.*about 3.0 instead of 12.0"):
        runs.append(OffloadedRun(TOY, slow, CHUNK_BYTES))
    for run in runs:
        for number in range(TOY.num_steps):
            run.step(number)
    assert 0 < slow.pinned_bytes <= 40_000
    assert slow.stall_s > fast.stall_s
    assert runs[0].finish() == runs[1].finish()


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "reentrant", "non_reentrant"])
def test_the_dry_trace_equals_that_of_the_real_step(recompute: str, at_once: int):
    """The same uses in the same order, the same pinned chunks, and non-model memory within 5 % of the real one:
    what the toy's tensors that are no experts occupy on the CPU."""
    toy = replace(TOY, recompute=recompute, num_micro_batches=2 * at_once, at_once=at_once)
    device = SimulatedDevice(10**9)
    real = OffloadedRun(toy, device, CHUNK_BYTES)
    device.meter = meter = StorageMeter([], device.storages)
    with meter:
        real.step(0)
    dry_meter = StorageMeter([], set())
    with dry_meter:
        dry = DryRuntime(toy.stacks, toy.dtype, CHUNK_BYTES, dry_meter, uses_at_once=at_once)
        layers = [StreamedExperts(compute, dry, stack.name) for stack in toy.stacks]
        for first in range(0, toy.num_micro_batches, at_once):
            torch.stack(toy.losses(layers, 0, range(first, first + at_once))).sum().backward()
        trace = dry.trace()
    found = real.runtime.trace
    assert [replace(m, nonmodel_bytes=0, seconds=0) for m in trace.moments] == [
        replace(m, nonmodel_bytes=0, seconds=0) for m in found.moments
    ]
    peaks = [max(m.nonmodel_bytes for m in each.moments) for each in (trace, found)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)
    assert all(moment.seconds > 0 for moment in found.moments)
    assert set(found.gradients_per_chunk().values()) == {2}


def test_one_gradient_leaves_the_device_for_uses_at_once():
    toy = replace(TOY, num_micro_batches=6, at_once=3)
    device = SimulatedDevice(10**9)
    run = OffloadedRun(toy, device, CHUNK_BYTES)
    run.step(0)
    assert device.downloaded_bytes == 2 * sum(size.gradient for size in run.runtime.sizes)
    assert run.finish() == train_plainly(replace(toy, num_steps=1))


@pytest.mark.parametrize("number", [2, 4])
def test_sums_of_gradients_are_rounded_once(number: int):
    """Against sums in fp64; those of four round in 16 bits three times if each is made in 16 bits, and then differ."""
    parts = torch.randn(number, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    sums = GradientSums(number)
    for part in parts[:-1]:
        assert sums.add(0, [part]) is None
    assert sums.unfinished == [0]
    (total,) = sums.add(0, [parts[-1]])
    assert sums.unfinished == []
    assert total.dtype == torch.bfloat16
    assert torch.equal(total, parts.double().sum(0).bfloat16())


def test_a_step_cannot_end_with_half_a_sum():
    toy = replace(TOY, at_once=2)
    run = OffloadedRun(toy, SimulatedDevice(10**9), CHUNK_BYTES)
    toy.loss(run.layers, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"the gradients of chunks \[0, 1, 2"):
        run.runtime.skip()


@pytest.mark.slow
def test_a_thousand_steps_leak_nothing():
    """Neither device memory nor pinned memory nor objects: the last 500 steps leave fewer than one in ten steps."""
    toy = replace(TOY, num_layers=2, num_experts=3, activations_on_host=frozenset({0, 1}))
    run = OffloadedRun(toy, SimulatedDevice(30_000), CHUNK_BYTES)
    run.step(0)
    run.runtime.adopt(solve(run.runtime.trace, run.runtime.sizes, 30_000))
    used, pinned, num_pins = run.device.used_bytes, run.device.pinned_bytes, run.device.num_pins
    num_objects: list[int] = []
    for number in range(1, 1001):
        run.step(1)
        run.outcome.losses.clear()
        run.outcome.norms.clear()
        if number % 500 == 0:
            run.runtime.drain()
            gc.collect()
            num_objects.append(len(gc.get_objects()))
    assert run.device.used_bytes == used
    assert (run.device.pinned_bytes, run.device.num_pins) == (pinned, num_pins)
    assert num_objects[1] - num_objects[0] < 50
