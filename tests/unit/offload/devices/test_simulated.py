"""The simulated device finds what would be a race, a stale read or too much memory on a real one."""

import threading

import pytest
import torch

from offload.devices.device import DeviceOutOfMemory, Peaks, Rates
from offload.devices.simulated import SimulatedDevice, SimulatedRace
from offload.memory.host_memory import HostBlock


def setup(num_bytes=64, **settings):
    device = SimulatedDevice(1000, eagerness=0.0, **settings)
    buffer = device.buffer(num_bytes)
    device.acquire(buffer)
    return device, buffer, buffer.view(torch.float32, 0, (num_bytes // 4,)), torch.arange(num_bytes / 4)


def test_new_memory_is_nan():
    _, _, view, _ = setup()
    assert view.isnan().all()


def test_a_copy_runs_when_something_waits_for_it():
    device, buffer, view, host = setup()
    event = device.upload(host, view, buffer, [device.compute_event()])
    assert view.isnan().all()
    device.compute_waits(event)
    assert torch.equal(view, host)
    device.computes_on(buffer, write=False)


def test_views_of_a_buffer_show_its_new_content():
    device, buffer, view, host = setup()
    device.release(buffer)
    device.acquire(buffer)
    device.compute_waits(device.upload(host, view, buffer, [device.compute_event()]))
    assert torch.equal(view, host)


def test_reading_before_the_upload_is_a_race():
    device, buffer, view, host = setup()
    device.upload(host, view, buffer, [device.compute_event()])
    with pytest.raises(SimulatedRace, match="compute reads memory without waiting for a write by upload"):
        device.computes_on(buffer, write=False)


def test_an_upload_into_used_memory_is_a_race():
    device, buffer, view, host = setup()
    with pytest.raises(SimulatedRace, match="upload writes memory without waiting for a write by compute"):
        device.upload(host, view, buffer, [])


def test_a_release_during_a_download_is_a_race():
    device, buffer, view, host = setup()
    device.download(view, host, buffer, [device.compute_event()])
    with pytest.raises(SimulatedRace, match="compute writes memory without waiting for a read by download"):
        device.release(buffer)


def test_a_write_by_the_host_during_an_upload_is_a_race():
    device, buffer, view, host = setup()
    event = device.upload(host, view, buffer, [device.compute_event()])
    device.compute_waits(event)
    with pytest.raises(SimulatedRace, match="main writes memory without waiting for a read by upload"):
        device.host_accesses(host, write=True)
    device.host_waits(event)
    device.host_accesses(host, write=True)


def test_only_events_order_threads():
    device, _, _, host = setup()
    device.host_accesses(host, write=True)
    event = device.host_event()
    found = []

    def other():
        try:
            device.host_accesses(host, write=False)
        except SimulatedRace as error:
            found.append(str(error))
        device.host_waits(event)
        device.host_accesses(host, write=False)
        found.append("fine")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found[0].endswith("without waiting for a write by main")
    assert found[1] == "fine"


def test_a_copy_first_runs_the_copies_that_it_waits_for():
    device, buffer, view, host = setup()
    up = device.upload(host, view, buffer, [device.compute_event()])
    target = torch.zeros(16)
    device.host_waits(device.download(view, target, buffer, [up]))
    assert torch.equal(target, host)


def test_a_tensor_freed_before_its_copy_is_a_race():
    device, _, _, host = setup()
    tensor = device.empty(16, torch.float32)
    assert tensor.isnan().all()
    event = device.download(tensor, host, tensor, [device.compute_event()])
    del tensor
    with pytest.raises(SimulatedRace, match="a tensor was freed before the copy of it"):
        device.compute_waits(event)
    tensor = device.empty(16, torch.float32)
    with pytest.raises(SimulatedRace, match="upload writes memory without waiting for a write by compute"):
        device.upload(host.clone(), tensor, tensor, [])


def test_pageable_memory_is_forgotten_when_it_is_freed():
    device, _, _, _ = setup(pinnable_bytes=0)
    with pytest.warns(UserWarning, match="could not be pinned"):
        block = HostBlock(64, device)
    assert device.pageable_bytes == 64
    assert len(device._pageable) == 1
    known = len(device.storages)
    block.free()
    assert device.pageable_bytes == 0
    assert device._pageable == []
    assert len(device.storages) == known - 1


def test_the_budget_holds_for_buffers_and_nonmodel_memory_together():
    device, buffer, _, _ = setup(nonmodel_trace=[100, 900, 930])
    second = device.buffer(64)
    with pytest.raises(DeviceOutOfMemory, match="64 bytes more than 64 of buffers and 930 of non-model memory"):
        device.acquire(second)
    assert device.begin_moment(0) == Peaks(nonmodel=930, total=994)
    device.acquire(second)
    with pytest.raises(DeviceOutOfMemory, match="900 bytes of non-model memory and 128 of buffers"):
        device.begin_moment(1)
    device.release(buffer)
    device.begin_moment(1)
    assert device.peak_bytes == 994
    with pytest.raises(RuntimeError, match="released before"):
        device.release(buffer)


def test_time_of_overlapping_copies():
    """An upload and a download overlap, and the computation waits for the end of one."""
    device, buffer, view, host = setup(latency_s=1.0, rates=Rates(upload=32.0, download=64.0))
    device.spend(2.0)
    up = device.upload(host, view, buffer, [device.compute_event()])
    device.spend(1.5)
    device.compute_waits(up)
    assert device.time_s == 2.0 + 1.0 + 64 / 32
    assert device.stall_s == 1.5


def test_copies_of_pageable_memory_have_their_own_rate():
    rates = Rates(upload=32.0, download=64.0, pageable=16.0)
    device, buffer, view, host = setup(latency_s=1.0, rates=rates, pinnable_bytes=0)
    with pytest.warns(UserWarning, match="could not be pinned"):
        block = HostBlock(64, device)
    pageable = block.view(host.dtype, 0, host.shape)
    times = []
    for source, target, download in [
        (host, view, False),
        (pageable, view, False),
        (view, host, True),
        (view, pageable, True),
    ]:
        begin = device.time_s
        copy = (device.download if download else device.upload)(source, target, buffer, [device.compute_event()])
        device.compute_waits(copy)
        times.append(device.time_s - begin)
    assert times == [1 + 64 / 32, 1 + 64 / 16, 1 + 64 / 64, 1 + 64 / 16]
