"""The lines of metrics."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m6.config.run import parse_config
from m6.runs.processes import Runtime
from m6.training.reporting.interval import IntervalReport, peak_flops
from tests.fixtures.tiny_run import tiny_document


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, False),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, True),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, True),
    ],
)
def test_the_utilization_of_a_gpu(changes: dict[str, Any], known: bool, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """It is known for 16-bit products, also where autocast alone makes them."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr("m6.training.reporting.interval.memory_bytes", lambda _: 0)
    report = IntervalReport(parse_config(tiny_document(folder, **changes)), Runtime(0, 1, 0, torch.device("cuda")))
    result = SimpleNamespace(targets={"text": 3.0}, loss_sums={"text": 3.0})
    numbers = dict.fromkeys(
        ("loss", "aux_loss", "tokens", "samples", "pictures", "token_pairs", "learning_rate", "grad_norm", "bad_rows"),
        1.0,
    )
    report.add(SimpleNamespace(result=result, skipped=False, loss_scale=1.0, **numbers))
    assert (report.finish(1, 1, 1)["mfu"] is not None) == known


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-PCIE-32GB", "fp16", 112e12),
        ("Tesla V100-PCIE-32GB", "bf16", None),
        ("NVIDIA Other", "bf16", None),
    ],
)
def test_peaks_of_cards_of_one_model_differ(
    name: str, precision: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda"), precision) == peak
