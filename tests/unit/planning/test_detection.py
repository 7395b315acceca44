"""The cluster that a process runs on."""

from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("name", "device"),
    [("NVIDIA GB200", "GB200"), ("NVIDIA GB300", "GB300"), ("NVIDIA B200", "B200"), ("NVIDIA H100 80GB HBM3", "H100")],
)
def test_the_description_of_the_device_itself(name: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """The name of a B200 is a part of that of a GB200, whose nodes and links are others."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=10**11))
    [nodes] = detect_cluster(4).nodes
    assert nodes.device.name == device
