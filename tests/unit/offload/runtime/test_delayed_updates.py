"""Updates that are one step late: they run beside the next step, whose uses find the weights before them."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from offload import Rates, SimulatedDevice, WorkerFailure
from offload.devices.simulated import SimulatedRace
from offload.memory.layout import NextWeights
from offload.runtime.slots import Slot
from tests.fixtures.toy_experts import OffloadedRun, Toy, train_plainly

CHUNK_BYTES = 2 * 2 * 8 * 16 * 4  # two experts of two fp32 matrices
TOY = Toy(num_steps=4)  # 3 layers of 3 chunks
NUM_CHUNKS = 9
PLACES: list[NextWeights] = ["gradient", "copy"]


def late_run(place: NextWeights | None, device: SimulatedDevice | None = None, **changes: Any) -> OffloadedRun:
    return OffloadedRun(replace(TOY, late=place, **changes), device or SimulatedDevice(60_000), CHUNK_BYTES)


@pytest.mark.parametrize("place", PLACES)
def test_the_next_forward_pass_does_not_wait_for_the_update(place: NextWeights, monkeypatch: pytest.MonkeyPatch):
    """No update ends before that pass is over, and the results are those of the recurrence."""
    run, forward_is_over, update = late_run(place), threading.Event(), Slot.update
    run.step(0)

    def blocked(self: Slot, *arguments: Any) -> None:
        assert forward_is_over.wait(60)
        update(self, *arguments)

    def watched(*arguments: Any) -> list[torch.Tensor]:
        losses = Toy.losses(*arguments)
        forward_is_over.set()
        return losses

    monkeypatch.setattr(Slot, "update", blocked)
    run.toy.__dict__["losses"] = lambda *arguments: watched(run.toy, *arguments)
    for number in range(1, TOY.num_steps):
        forward_is_over.clear()
        run.step(number)
    assert run.finish() == train_plainly(replace(TOY, late=place))


def test_an_update_that_is_not_late_keeps_the_next_forward_pass_waiting(monkeypatch: pytest.MonkeyPatch):
    def never(*_: Any) -> None:
        raise TimeoutError("waits for the end of a forward pass that waits for it")

    run = late_run(None)
    monkeypatch.setattr(Slot, "update", never)
    run.step(0)
    with pytest.raises(WorkerFailure):
        Toy.loss(run.toy, run.layers, 1, 0)


def test_weights_without_a_second_place_are_a_race():
    """The vector clocks see it whatever the timing is."""
    run = late_run("copy")
    for slot in run.runtime._slots:
        slot.planes["next_weight"] = slot.planes["weight"]
    run.step(0)
    with pytest.raises((SimulatedRace, WorkerFailure), match="without waiting"):
        run.step(1)


def test_a_second_gradient_has_no_place():
    run = late_run("gradient", num_micro_batches=2)
    with pytest.raises(RuntimeError, match=r"a second gradient of chunk .* took the place of the weights"):
        run.step(0)


def test_new_weights_in_the_place_of_the_gradient_take_no_memory():
    sizes = {place: late_run(place).runtime.host_bytes for place in (None, *PLACES)}
    assert sizes["gradient"] == sizes[None]
    parameters = sum(stack.num_experts * stack.expert_size for stack in TOY.stacks)
    assert sizes["copy"] - sizes[None] == 4 * parameters


def seconds_of_a_step(place: NextWeights | None, update_s: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Simulated time: a chunk computes 1 s in the forward and 2 s in the backward pass; copies take none."""
    device = SimulatedDevice(60_000, rates=Rates(1e18, 1e18, 1e18), latency_s=0.0)
    run, update = late_run(place, device), Slot.update

    def slow(self: Slot, *arguments: Any) -> None:
        device.host_spends(update_s)
        update(self, *arguments)

    def timed(compute: Any) -> Any:
        def forward(*arguments: Any) -> torch.Tensor:
            device.spend(1.0)
            output: torch.Tensor = compute(*arguments)
            output.register_hook(lambda _: device.spend(2.0))
            return output

        return forward

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "update", slow)
        for layer in run.layers:
            layer._compute = timed(layer._compute)
        times = []
        for number in range(TOY.num_steps):
            run.step(number)
            times.append(device.time_s)
        run.finish()
    return times[3] - times[2]


@pytest.mark.parametrize("update_s", [0.5, 2.5, 4.0])
def test_the_time_of_a_step_is_that_of_the_closed_form(update_s: float, monkeypatch: pytest.MonkeyPatch):
    """As m6/planning/cost/compute_time.py prices it; one chunk computes after the last update of a forward pass."""
    forward, backward, host = NUM_CHUNKS * 1.0, NUM_CHUNKS * 2.0, NUM_CHUNKS * update_s
    late = seconds_of_a_step("gradient", update_s, monkeypatch)
    assert late == pytest.approx(max(forward + backward, host), rel=1e-6)
    at_once = seconds_of_a_step(None, update_s, monkeypatch)
    assert max(forward, host) + backward <= at_once <= max(forward, host) + backward + 1.0 + 1e-6
