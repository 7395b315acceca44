"""The CUDA device: its logic over a stand-in for ``torch.cuda``, and the same training on a card where there is one."""

import gc
from dataclasses import replace

import pytest
import torch

import offload.devices.cuda
from offload import OptimizerSettings, SimulatedDevice, solve
from offload.devices.cuda import CudaDevice
from offload.devices.device import DeviceOutOfMemory, Peaks
from offload.memory.host_memory import HostBlock
from offload.memory.layout import window_bytes
from tests.fixtures.cuda_stand_in import StandIn, StandInDevice
from tests.fixtures.toy_experts import OffloadedRun, Toy, train_plainly

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
CHUNK_BYTES = 2 * 2 * 8 * 16 * 4  # two experts of two fp32 matrices
TOYS = [
    Toy(),
    Toy(activations_on_host=frozenset(range(3))),
    Toy(recompute="reentrant", num_micro_batches=3, dtype=torch.bfloat16, activations_on_host=frozenset(range(3))),
    Toy(shared=True, recompute="non_reentrant", gradient_dtype=torch.float32, dtype=torch.float16, loss_scale=128.0),
    Toy(overflow_step=1, optimizer=OptimizerSettings("adafactor")),
    Toy(num_experts=1, num_layers=4, optimizer=OptimizerSettings("sgd", momentum=0.9)),
]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(offload.devices.cuda, "cuda", stand_in)
    return stand_in


def some_budget(toy: Toy) -> int:
    """For one window of chunks and a third of all chunks."""
    sizes = OffloadedRun(toy, SimulatedDevice(10**9), CHUNK_BYTES).runtime.sizes
    return window_bytes(sizes, 2) + 3000 + sum(size.owned for size in sizes) // 3


def train(toy: Toy, device: CudaDevice, budget: int, prefetch_depth: int = 2) -> OffloadedRun:
    run = OffloadedRun(toy, device, CHUNK_BYTES)
    for number in range(toy.num_steps):
        run.step(number)
        if number == 0:
            run.runtime.adopt(solve(run.runtime.trace, run.runtime.sizes, budget, prefetch_depth))
    return run


@pytest.mark.parametrize("toy", TOYS, ids=range(len(TOYS)))
def test_results_equal_those_of_resident_experts(toy: Toy, stand_in: StandIn):
    """Copies run as late as possible into memory filled with NaN, so a missing wait changes the results."""
    budget = some_budget(toy)
    run = train(toy, StandInDevice(budget, stand_in), budget)
    assert run.runtime.plan is not None
    assert run.runtime.plan.upload_bytes > 0
    if toy.shared:  # a plain parameter would add up its uses' gradients before their cast
        large = OffloadedRun(toy, StandInDevice(10**9, stand_in), 10**9)
        for number in range(toy.num_steps):
            large.step(number)
        assert run.finish() == large.finish()
    else:
        assert run.finish() == train_plainly(toy)


def test_the_budget_counts_everything_on_the_card(stand_in: StandIn):
    device = StandInDevice(2000, stand_in)
    first, second = device.buffer(500), device.buffer(500)
    device.acquire(first)
    stand_in.others = 900
    assert device.nonmodel_bytes == 900
    device.acquire(second)
    device.release(second)
    stand_in.others = 1100
    with pytest.raises(DeviceOutOfMemory, match="500 bytes more than 500 of buffers and 1100 of non-model memory"):
        device.acquire(second)
    assert device.begin_moment(0) == Peaks(nonmodel=1100, total=1900)
    with pytest.raises(RuntimeError, match="released before"):
        device.release(second)


def test_the_default_budget_is_most_of_the_free_memory(stand_in: StandIn):
    assert StandInDevice(None, stand_in).budget_bytes == 95_000


def test_peaks_between_moments_are_recorded(stand_in: StandIn):
    device = StandInDevice(10_000, stand_in)
    buffer = device.buffer(1000)
    stand_in.others = 3000
    stand_in.max_memory_allocated(None)
    stand_in.others = 100
    device.acquire(buffer)
    assert device.begin_moment(0) == Peaks(nonmodel=3000, total=3000)
    assert device.begin_moment(1) == Peaks(nonmodel=100, total=1100)


def test_the_largest_peak_of_a_card_is_kept(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch):
    """PyTorch's own statistic begins anew at each moment, and with each device."""
    monkeypatch.setattr(CudaDevice, "_largest_peaks", {})
    device = StandInDevice(10_000, stand_in)
    stand_in.others = 3000
    stand_in.max_memory_allocated(None)
    stand_in.others = 100
    device.begin_moment(0)
    StandInDevice(10_000, stand_in).begin_moment(0)
    assert CudaDevice.largest_peak(device.torch_device) == 3000
    stand_in.others = 4000
    assert CudaDevice.largest_peak(device.torch_device) == 4000


def test_host_memory_is_pinned_with_exact_size_and_unpinned(stand_in: StandIn):
    device = StandInDevice(10_000, stand_in)
    block = HostBlock(5000, device)
    assert list(stand_in.registered.values()) == [5000]
    assert device.pinned_bytes == 5000
    block.free()
    assert not stand_in.registered
    assert device.pinned_bytes == 0


def test_a_block_that_nobody_frees_is_unpinned_too(stand_in: StandIn):
    """CUDA would take another mapping at the same addresses for the pinned one, whose pages are gone."""
    device = StandInDevice(10_000, stand_in)
    block = HostBlock(5000, device)
    del block
    assert not stand_in.registered
    run = train(Toy(activations_on_host=frozenset(range(3))), StandInDevice(48_000, stand_in), 48_000)
    assert stand_in.registered
    run.runtime._workers.close()  # a thread that has just ended a job may still refer to it
    del run
    gc.collect()
    assert not stand_in.registered


def test_memory_that_was_freed_while_it_was_pinned_is_an_error(stand_in: StandIn):
    device = StandInDevice(10_000, stand_in)
    block = HostBlock(5000, device)
    with pytest.raises(RuntimeError, match="freed while it was pinned"):
        device.pin(block.view(torch.uint8, 0, (5000,)))


def test_uploads_from_memory_that_is_not_pinned_find_what_was_downloaded(stand_in: StandIn):
    """CUDA may read such memory when the copy is called; the stand-in reads it as late as possible."""
    stand_in.pinnable_bytes = 0
    device = StandInDevice(10_000, stand_in)
    with pytest.warns(UserWarning, match="could not be pinned"):
        block = HostBlock(400, device)
    host = block.view(torch.float32, 0, (100,))
    buffer = device.buffer(400)
    device.acquire(buffer)
    view = buffer.view(torch.float32, 0, (100,))
    view.fill_(3.0)
    downloaded = device.download(view, host, buffer, [device.compute_event()])
    device.upload(host, view, buffer, [downloaded])
    assert host.eq(3.0).all()


def test_memory_that_cannot_be_pinned_is_pageable_with_a_warning(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch):
    stand_in.pinnable_bytes = 20_000
    monkeypatch.setattr(offload.devices.cuda, "_PROBE_BYTES", 4096)
    with pytest.warns(UserWarning, match=r"could not be pinned \(cudaHostRegister returned 2\).*instead of.*GB/s"):
        run = train(Toy(), StandInDevice(48_000, stand_in), 48_000)
    assert run.device.pageable_bytes > 0
    assert run.finish() == train_plainly(Toy())


def test_later_steps_neither_pin_memory_nor_make_streams(stand_in: StandIn):
    run = train(Toy(), StandInDevice(48_000, stand_in), 48_000)
    before = stand_in.num_registered, stand_in.num_streams
    for number in range(5):
        run.step(number)
    run.runtime.drain()
    assert (stand_in.num_registered, stand_in.num_streams) == before
    assert min(before) > 0


@pytest.mark.parametrize("toy", TOYS, ids=range(len(TOYS)))
@pytest.mark.gpu
@NEEDS_GPU
def test_on_a_card_the_budget_changes_nothing(toy: Toy):
    """Losses and state to the bit; norms to the roundings of sums, which the card adds up in another order. Without
    clipping, which would carry those roundings on."""
    device, outcomes = torch.device("cuda", 0), []
    # Libraries take memory at first use; cuBLAS takes 32 MiB for each of its handles.
    train(replace(toy, clip=False, device="cuda"), CudaDevice(10**9, device), 10**9).finish()
    for room in (some_budget(toy), 10**9):
        # Small tensors of the computation, and what the allocator rounds up, come on top.
        budget = torch.cuda.memory_allocated(device) + room + 33 * 2**20  # for one more handle
        run = train(replace(toy, clip=False, device="cuda"), CudaDevice(budget, device), budget)
        outcomes.append(run.finish())
    assert outcomes[0].losses == outcomes[1].losses
    if not toy.shared:
        assert outcomes[0].losses == pytest.approx(train_plainly(replace(toy, clip=False)).losses, rel=1e-3)
    assert outcomes[0].norms == pytest.approx(outcomes[1].norms, rel=1e-12)
    assert outcomes[0].state.keys() == outcomes[1].state.keys()
    for name, value in outcomes[0].state.items():
        assert torch.equal(value, outcomes[1].state[name]), name


@pytest.mark.gpu
@NEEDS_GPU
def test_on_a_card_copies_keep_their_order():
    """An upload behind a long computation on the same memory, and its download behind the upload."""
    device = CudaDevice(None, torch.device("cuda", 0))
    block = HostBlock(4 * 2**20, device)
    other = HostBlock(4 * 2**20, device)
    source, target = (each.view(torch.float32, 0, (2**20,)) for each in (block, other))
    buffer = device.buffer(4 * 2**20)
    for number in range(20):
        device.acquire(buffer)
        view = buffer.view(torch.float32, 0, (2**20,))
        view.fill_(-1.0)
        source.fill_(float(number))
        up = device.upload(source, view, buffer, [device.compute_event()])
        down = device.download(view, target, buffer, [up])
        device.compute_waits(down)
        device.host_waits(down)
        assert target.eq(number).all()
        device.release(buffer)
    assert device.used_bytes == 0
