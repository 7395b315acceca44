"""The cluster that a process runs on."""

import pytest

from m6.errors import UserError
from m6.planning.machine.detection import detect_cluster


def test_the_machine_at_hand(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="CPU core has no network"):
        detect_cluster(4)
    assert detect_cluster(2).num_devices == 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Quantum 9")
    with pytest.raises(UserError, match="device 'Quantum 9' is in no description"):
        detect_cluster(2)
