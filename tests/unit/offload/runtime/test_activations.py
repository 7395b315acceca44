"""Activations on the host: the same numbers with less memory, and nothing that need not move does."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from offload import ActivationOffload, DryRuntime, SimulatedDevice, StorageMeter, StreamedExperts
from offload.devices.simulated import SimulatedRace
from offload.memory.host_memory import HostBlock
from offload.runtime.activations import Arena
from tests.fixtures.toy_experts import SMALL_BYTES, OffloadedRun, Toy, compute, train_offloaded, train_plainly

# What goes wrong at the end of an activation's life cannot be raised there.
STRICT = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
CHUNK_BYTES = 2 * 2 * 8 * 16 * 4  # two experts of two fp32 matrices
ALL = frozenset(range(8))
TOY = Toy(activations_on_host=ALL)
DEEP = Toy(num_layers=8, num_experts=4, hidden_size=16, ffn_hidden_size=128, activations_on_host=ALL)


def offloading(eagerness: float = 0.0) -> ActivationOffload:
    device = SimulatedDevice(10**9, eagerness=eagerness)
    activations = ActivationOffload(device, partial(HostBlock, device=device))
    activations.small_bytes = 0
    return activations


@STRICT
@pytest.mark.parametrize("recompute", ["none", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_results_equal_those_without_offloading(recompute: str, dtype: torch.dtype, num_micro_batches: int):
    toy = replace(TOY, recompute=recompute, dtype=dtype, num_micro_batches=num_micro_batches)
    outcome, runtime = train_offloaded(toy, SimulatedDevice(60_000, seed=num_micro_batches), CHUNK_BYTES)
    assert outcome == train_plainly(toy)
    assert runtime.activations.downloaded_bytes > runtime.activations.uploaded_bytes > 0


def nonmodel_bytes_of(toy: Toy) -> tuple[int, int]:
    """The most non-model bytes of a step, and of the same step by the dry run."""
    device = SimulatedDevice(10**9)
    real = OffloadedRun(toy, device, chunk_bytes=1)
    device.meter = meter = StorageMeter([], device.storages)
    with meter:
        real.step(0)
    dry_meter = StorageMeter([], set())
    with dry_meter:
        dry = DryRuntime(toy.stacks, toy.dtype, 1, dry_meter)
        dry.activations.small_bytes = SMALL_BYTES
        layers = [StreamedExperts(compute, dry, stack.name) for stack in toy.stacks]
        for micro_batch in range(toy.num_micro_batches):
            toy.loss(layers, 0, micro_batch, dry.activations).backward()
        trace = dry.trace()
    assert dry.activations.downloaded_bytes == real.runtime.activations.downloaded_bytes
    assert dry.activations.uploaded_bytes == real.runtime.activations.uploaded_bytes
    assert dry.activations.host_bytes == real.runtime.activations.host_bytes
    return tuple(max(moment.nonmodel_bytes for moment in each.moments) for each in (real.runtime.trace, trace))


@pytest.mark.parametrize("recompute", ["none", "reentrant", "non_reentrant"])
def test_nonmodel_memory_is_smaller_and_the_dry_run_knows(recompute: str):
    toy = replace(DEEP, recompute=recompute, num_micro_batches=2)
    with_all, dry = nonmodel_bytes_of(toy)
    without, _ = nonmodel_bytes_of(replace(toy, activations_on_host=frozenset()))
    # Two layers' activations of eight are there at a time; under checkpointing one layer's beside eight inputs.
    assert with_all < (0.5 if recompute == "none" else 0.9) * without
    assert dry == pytest.approx(with_all, rel=0.05)


def test_what_is_not_moved():
    """Parameters, weights of chunks, integers, masks and small tensors; only one of the saved tensors is moved."""
    activations = offloading()
    activations.small_bytes = 400
    device = activations.device
    assert isinstance(device, SimulatedDevice)
    buffer = device.buffer(400)
    device.acquire(buffer)
    weight, chunk = torch.randn(10, 10, requires_grad=True), buffer.view(torch.float32, 0, (10, 10)).fill_(2.0)
    rows = torch.randn(10, 10)
    with activations.unit([weight]):
        moved = weight @ rows  # saves both
        moved = torch.where(torch.ones(10, 10) > 0, moved, 0.0)  # a mask
        moved = moved.index_select(0, torch.arange(10).repeat(10)[:10])  # integers
        moved = moved[:, :3] * torch.full((10, 3), 2.0)  # small
        (moved.sum() + (weight * chunk).sum()).backward()
    assert activations.downloaded_bytes == 400
    expected = 2 * rows[:, :3].sum(1).expand(10, 10) + 2.0
    torch.testing.assert_close(weight.grad, expected)


@STRICT
def test_a_storage_is_moved_once_and_keeps_its_strides():
    found: list[tuple[Tensor, Tensor]] = []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, *views):
            ctx.save_for_backward(*views)
            ctx.views = views
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            found.extend(zip(ctx.saved_tensors, ctx.views, strict=True))
            return gradient, None, None, None

    activations = offloading()
    base, start = torch.randn(6, 8), torch.randn(3, requires_grad=True)
    with activations.unit():
        result = Save.apply(start, base, base.t()[2:5], base[:, 4:])
    with activations.unit():  # the first unit leaves
        result = result.exp()
    result.sum().backward()
    assert activations.downloaded_bytes == base.nbytes + start.nbytes
    assert activations.uploaded_bytes == base.nbytes
    assert len(found) == 3
    for back, view in found:
        assert torch.equal(back, view)
        assert back.data_ptr() != view.data_ptr()
        assert (back.stride(), back.storage_offset()) == (view.stride(), view.storage_offset())


@pytest.mark.parametrize("leaves", [True, False])
def test_changing_a_saved_tensor_in_place_is_an_error(leaves: bool):
    activations = offloading()
    start, scale = torch.ones(4, requires_grad=True), torch.full((4,), 3.0)
    with activations.unit():
        result = start * scale
    scale.add_(1.0)

    def leave_or_read() -> None:
        if leaves:
            with activations.unit():
                pass
        result.sum().backward()

    with pytest.raises(RuntimeError, match="saved for the backward pass was changed in place"):
        leave_or_read()


def test_uploads_start_a_unit_ahead():
    activations = offloading()
    values, uploaded = [torch.randn(100, requires_grad=True)], []
    for _ in range(4):
        with activations.unit():
            values.append(values[-1].exp())  # saves its result
        values[-1].register_hook(lambda _: uploaded.append(activations.uploaded_bytes))
    values[-1].sum().backward()
    # When the last unit's backward pass is about to begin nothing came back, then always one more than was needed.
    assert uploaded == [0, 400, 800, 1200]
    assert activations.downloaded_bytes == 1600


def test_nested_units_are_an_error():
    activations = offloading()
    with activations.unit(), pytest.raises(RuntimeError, match="begins within another one"), activations.unit():
        pass
    with activations.unit():  # what failed has ended
        pass


def test_without_gradients_nothing_happens():
    activations = offloading()
    weight = torch.randn(10, requires_grad=True)
    with torch.no_grad(), activations.unit():
        weight.exp()
    assert activations.host_bytes == activations.downloaded_bytes == 0
    assert activations._units == []


@STRICT
def test_two_backward_passes_over_one_graph():
    activations = offloading()
    weight = torch.randn(50, requires_grad=True)
    with activations.unit():
        middle = weight.exp()
    with activations.unit():
        loss = middle.sin().sum()
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * first)
    assert torch.equal(first, middle.detach().cos() * middle.detach())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_keeps_its_input_on_the_host(use_reentrant: bool):
    activations = offloading()
    weight = torch.randn(100, requires_grad=True)
    value = weight
    for _ in range(3):
        with activations.unit([weight]):
            value = checkpoint(lambda x: x.sin().exp().cos(), value, use_reentrant=use_reentrant)
    value.sum().backward()
    assert activations.downloaded_bytes == 2 * 400
    assert activations.uploaded_bytes == 400
    plain = weight.detach().requires_grad_()
    value = plain
    for _ in range(3):
        value = value.sin().exp().cos()
    value.sum().backward()
    assert torch.equal(weight.grad, plain.grad)


@STRICT
def test_no_memory_leaks_after_steps_or_graphs_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch):
    """The slabs of the first step serve all others."""
    monkeypatch.setattr(ActivationOffload, "slab_bytes", 4096)
    run = OffloadedRun(TOY, SimulatedDevice(60_000), CHUNK_BYTES)
    run.step(1)
    activations, pins = run.runtime.activations, run.device.num_pins
    held = activations.host_bytes
    assert held > 4096
    for number in range(10):
        run.step(1)
        loss = TOY.loss(run.layers, 1, 0, activations) if number % 2 else None
        assert any(slab.used_bytes for slab in activations.arena._slabs) == (number % 2 == 1)
        del loss
    assert not any(slab.used_bytes for slab in activations.arena._slabs)
    assert (activations.host_bytes, run.device.num_pins) == (held, pins)
    run.finish()  # asserts that no host memory is left


def test_close_frees_slabs_of_a_graph_with_the_graph(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ActivationOffload, "slab_bytes", 4096)
    activations = offloading()
    device = activations.device
    assert isinstance(device, SimulatedDevice)
    with activations.unit():
        result = torch.randn(100, requires_grad=True).exp()
    activations.close()
    assert device.pinned_bytes == 4096
    del result
    assert device.pinned_bytes == 0


def test_a_large_storage_gets_a_slab_of_its_own():
    made: list[int] = []

    def new_block(num_bytes: int) -> HostBlock:
        made.append(num_bytes)
        return HostBlock(num_bytes, SimulatedDevice(0))

    arena = Arena(new_block, 2048)
    pieces = [arena.take(size) for size in (1000, 5000, 1000, 100)]
    assert made == [2048, 5120, 2048]
    assert [offset for _, offset in pieces] == [0, 0, 1024, 0]
    for slab, _ in reversed(pieces):
        arena.give(slab)
    again = [arena.take(size) for size in (900, 5000, 1100, 600)]
    assert made == [2048, 5120, 2048]
    assert [offset for _, offset in again] == [0, 0, 0, 1024]
    assert arena.num_bytes == sum(made)


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_missing_wait_is_a_race(skipped: int, eagerness: float, monkeypatch: pytest.MonkeyPatch):
    """For the first download, before its memory is another's, and for the only upload, before that is read. The wait
    between is for the second download."""
    activations = offloading(eagerness)
    device, waits = activations.device, []

    def wait(event: object) -> None:
        waits.append(event)
        if len(waits) != skipped + 1:
            SimulatedDevice.compute_waits(device, event)

    monkeypatch.setattr(device, "compute_waits", wait)

    def step() -> None:
        value = torch.randn(100, requires_grad=True)
        for _ in range(2):
            with activations.unit():
                value = value.exp()
        value.sum().backward()

    with pytest.raises(SimulatedRace):
        step()
