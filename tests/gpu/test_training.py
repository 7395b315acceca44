"""Runs on a card have the losses of a run on a CPU, in every precision and with experts in host memory."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_run import write_tiny_config

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
STEPS = 6
# Dropout draws other numbers on a card.
PLAIN = {
    "m6__model__hidden_dropout": 0.0,
    "m6__training__total_steps": STEPS,
    "m6__schedule__decay": "constant",
}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": 2}}
STREAMED = {"m6__offload": {"chunk_mib": 0.04, "rules": [{"kind": "expert", "place": "stream"}]}}
# Relative to the loss: sums in another order; weights of 11 and of 8 bits.
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 1e-4),
    "recomputation": ({"m6__training__activation_checkpointing": True}, 1e-4),
    "Muon": ({"optimizer": {"type": "Muon", "params": {"lr": 3e-3, "adamw_lr": 1e-2}}}, 1e-2),  # products in bf16
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 1e-2),
    "bf16": (BF16, 1e-2),
    "fp16": (FP16, 5e-3),
    "streamed": (STREAMED, 1e-4),
    "streamed bf16": ({**BF16, **STREAMED}, 1e-2),
    "streamed fp16": ({**FP16, **STREAMED}, 5e-3),
    "pseudo": ({"m6__model__num_layers": 4, "m6__pseudo_to_real": {"switch_step": 3}}, 1e-4),
}


def pretrain(config: Path, run: Path, **environment: str) -> list[float]:
    """Trains in a process of its own, to the end of the run, and returns the loss of each step."""
    command = [sys.executable, "-m", "m6", "pretrain", config, "--run-dir", run]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_a_cpu(name: str, tmp_path: Path):
    """Of the same run in fp32 without offloading, whose initial weights and batches are the same."""
    changes, tolerance = CASES[name]
    write = functools.partial(write_tiny_config, tmp_path)
    own = {**PLAIN, **changes}
    reference = {
        key: value
        for key, value in own.items()
        if not set(key.split("__")) & {"bf16", "fp16", "torch_autocast", "offload"}
    }
    expected = pretrain(
        write("cpu.json", **{**reference, "zero_optimization": {"stage": 0}}), tmp_path / "cpu", **ON_CPU
    )
    found = pretrain(write("gpu.json", **own), tmp_path / "gpu", DS_ACCELERATOR="cuda")
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("changes", [{}, {**FP16, **STREAMED}], ids=["fp32", "streamed fp16"])
def test_a_second_attempt_goes_on_where_the_first_stopped(changes: dict[str, Any], tmp_path: Path):
    """Up to sums whose order on a card is not fixed."""
    write = functools.partial(write_tiny_config, tmp_path)
    whole = pretrain(write("whole.json", **PLAIN, **changes), tmp_path / "whole", DS_ACCELERATOR="cuda")
    shorter = {**PLAIN, **changes, "m6__training__total_steps": 4}
    half = pretrain(write("half.json", **shorter), tmp_path / "run", DS_ACCELERATOR="cuda")
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.read_bytes()
    found = pretrain(write("rest.json", **PLAIN, **changes), tmp_path / "run", DS_ACCELERATOR="cuda")
    assert found[:4] == half
    assert metrics.read_bytes().startswith(before)  # nothing was trained again
    assert found[4:] == pytest.approx(whole[4:], rel=1e-3 if "fp16" in changes else 1e-4)
