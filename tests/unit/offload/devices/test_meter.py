"""The meter of storages: what counts, for how long, and the peak."""

import torch

from offload.devices.meter import StorageMeter


def test_storages_count_from_their_operator_until_they_are_freed() -> None:
    existing, ignored = torch.zeros(100), torch.zeros(1000)
    meter = StorageMeter([existing, existing.view(10, 10)], {ignored.untyped_storage()._cdata})
    assert meter.total == meter.take_peak() == 400
    with meter:
        one = torch.ones(50)
        view = one[:10]
        ignored.add_(1)
        pair = torch.ones(20, dtype=torch.float64).split(5)
        torch.empty(10**6, device="meta")
        assert meter.total == 400 + 200 + 160
        del one
        assert meter.total == 400 + 200 + 160, "the view keeps the storage"
        del view
        assert meter.total == 400 + 160
    other = torch.ones(7)  # outside
    assert meter.total == 400 + 160
    del pair, existing, other
    assert meter.total == 0
    assert meter.take_peak() == 400 + 200 + 160
    assert meter.take_peak() == 0
