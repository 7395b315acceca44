"""The description of a machine in reports."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from m6.data.workers import usable_cores


def hardware(device: torch.device) -> str:
    """Returns a description of this machine: CPU model, usable cores, GPUs."""
    cores = usable_cores()
    text = f"{_cpu_model()}, {cores} core{'' if cores == 1 else 's'}"
    if device.type == "cuda":
        text += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
    return text


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
