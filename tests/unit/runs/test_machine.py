"""What a run needs of its machine is told before its folder exists."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from m6.errors import UserError
from m6.runs.machine import _check_kernels
from tests.fixtures.command import user_error
from tests.fixtures.tiny_run import tiny_document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine")


def message(folder: Path, zero: dict[str, Any], **changes: Any) -> str:
    """What ``m6 pretrain`` says at ZeRO stage 3."""
    config, run = folder / "tiny.json", folder / "run"
    config.write_text(json.dumps(tiny_document(folder, zero_optimization={"stage": 3, **zero}, **changes)))
    text = user_error("pretrain", config, "--run-dir", run)
    assert not run.exists()
    return text


def test_a_card_without_kernels_is_told_before_the_run_begins(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A V100 with the default build of PyTorch 2.11, in place of an error of its first kernel."""
    monkeypatch.setattr("m6.runs.machine.own_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_80", "compute_120"])
    with pytest.raises(
        UserError, match=r"Tesla V100-SXM2-32GB, sm_70: .* sm_75, sm_80, compute_120 alone; .*whl/cu126"
    ):
        _check_kernels()
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    _check_kernels()


@pytest.mark.parametrize("kind", ["weights", "nontrainable_weights", "gradients"])
def test_quantisation_needs_an_operator_that_a_cpu_has_not(folder: Path, kind: str):
    key = f"zero_quantized_{kind}"
    expected = f"zero_optimization.{key}: DeepSpeed has no operator for it on the cpu of this machine"
    assert message(folder, {key: True}) == expected


def test_nvme_needs_an_operator_and_a_folder(folder: Path, tmp_path: Path, monkeypatch):
    section = "offload_param"
    builder = get_accelerator().get_op_builder("AsyncIOBuilder")
    monkeypatch.setattr(builder, "is_compatible", lambda self, verbose: False)
    path = tmp_path / "nvme"
    zero = {section: {"device": "nvme", "nvme_path": str(path)}}
    assert f"zero_optimization.{section}.nvme_path: {path} is missing; expected a folder" in message(folder, zero)
    path.write_text("")
    assert f"{path} is a file; expected a folder" in message(folder, zero)
    path.unlink()
    path.mkdir()
    assert f'{section}.device "nvme": DeepSpeed cannot compile its operator async_io' in message(folder, zero)
    monkeypatch.setattr(builder, "is_compatible", lambda self, verbose: True)
    assert "aio.use_gds: DeepSpeed has no operator for it" in message(folder, zero, aio={"use_gds": True})
    # Permissions do not hold for root, who may be running this.
    access = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != path and access(at, mode))
    assert f"{section}.nvme_path: {path} cannot be written" in message(folder, zero)


@pytest.mark.parametrize("name", ["missing.Linear", "torch.nn.Missing", "Linear", "torch.nn."])
def test_modules_of_autocast_are_looked_for(folder: Path, name: str):
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear", name]}
    text = message(folder, {}, torch_autocast=autocast)
    assert f"torch_autocast.lower_precision_safe_modules: '{name}' cannot be imported" in text


def test_an_api_key_is_looked_for_by_the_process_that_needs_it(folder: Path, tmp_path: Path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert "there is no API key" in message(folder, {}, m6__logging__wandb="online")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("WANDB_MODE", "onlin")  # the next check, which fails on every rank
    assert "WANDB_MODE" in message(folder, {}, m6__logging__wandb="online")
