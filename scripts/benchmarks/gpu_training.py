"""How fast the trainer is on one GPU, what it holds there, and what the planner predicted of both."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import typer

from m6.planning.machine.profile import Profile, load_profile
from m6.planning.prediction import Outcome, read_outcome
from scripts.benchmarks.record import RESULTS, ROOT, Recorder, spread

PROFILE = RESULTS / "gpu_profile.json"
# The data of scripts/smoke.sh, whose texts and captions are packed into rows of 512 tokens.
COMMON = {
    "m6.data.path": "data/smoke",
    "m6.data.tokenizer": "data/smoke/tokenizer",
    "m6.data.num_workers": 8,
    "m6.model.text_vocab_size": 6000,
    "m6.model.image_vocab_size": 256,
    "m6.training.ep_size": 1,
    "m6.training.total_steps": 10_000,
    "m6.evaluation.interval_steps": 10_000,
    "m6.checkpoint.interval_steps": 10_000,
    "m6.logging.interval_steps": 1,
    "m6.logging.wandb": "off",
    "zero_optimization.stage": 1,
}
SERIES = ("step_time_s", "data_wait_s", "tokens_per_second", "mfu", "memory_bytes", "loss")
OFFLOADED = {"m6.offload.num_threads": 12, "m6.offload.chunk_mib": "auto"}
LARGE = {"m6.moe.num_experts": 32}  # m6t_10b with 2.8 B parameters


@dataclass(frozen=True)
class Case:
    """A run of one of the shipped configurations, with changes.

    Attributes:
        batch: samples of a step, which is one micro-batch.
        steps: after which the run is killed.
        seconds: after which it is killed in any case.
    """

    config: str
    batch: int
    changes: dict[str, Any] = field(default_factory=dict)
    steps: int = 60
    seconds: int = 110

    def options(self) -> list[str]:
        sizes = {"train_micro_batch_size_per_gpu": self.batch, "train_batch_size": self.batch}
        changes = {**COMMON, **sizes, **self.changes}
        return [part for key, value in changes.items() for part in ("--set", f"{key}={json.dumps(value)}")]


NO_RECOMPUTATION = {"m6.training.activation_checkpointing": False}
# 512 samples are about 68,000 tokens.
CASES = {
    "1.4 B": Case("m6t_base", 512, NO_RECOMPUTATION),
    "1.4 B, recomputed": Case("m6t_base", 512),
    "1.4 B, fp16": Case("m6t_base", 512, {**NO_RECOMPUTATION, "bf16.enabled": False, "fp16.enabled": True}),
    "2.8 B": Case("m6t_10b", 256, LARGE, steps=30),
    "2.8 B, experts on the host": Case(
        "m6t_10b", 256, {**LARGE, **OFFLOADED, "m6.offload.device_budget_mib": 24_000}, steps=15
    ),
    "10.8 B, experts on the host": Case(
        "m6t_10b",
        256,
        {**OFFLOADED, "m6.offload.optimizer": {"type": "Adafactor", "lr": 0.005}},
        steps=12,
        seconds=200,
    ),
}

HEADER = ("run", "step, s", "data sheet's, s", "calibrated, s", "tokens/s", "MFU", "memory, GB", "predicted, GB")
NOTES = (
    "Median, 10th and 90th percentile of the last two thirds of the steps, without waiting for data, against the "
    "prediction by the shipped description of the GPU and by `gpu_profile.json`, which `m6 plan calibrate` wrote on "
    "the same card. Memory is PyTorch's peak on the card. Tokens are without padding. 512 samples fill 130 to 140 rows "
    "of 512 tokens; cuDNN plans attention anew, for 14 ms a layer, when a number of rows is new."
)

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


def train(case: Case, folder: Path) -> str:
    """Trains until the last of the case's steps is logged; returns what the run printed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}.log"
    command = [sys.executable, "-m", "m6", "pretrain", case.config, "--run-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with log.open("w") as printed:
        trainer = subprocess.Popen(
            [*command, *case.options()],
            cwd=ROOT,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + case.seconds
    metrics = folder / "metrics.jsonl"
    try:
        while trainer.poll() is None and time.monotonic() < end:
            if metrics.exists() and metrics.read_text().count('"step_time_s"') >= case.steps:
                break
            time.sleep(0.2)
    finally:  # a run that goes on would slow down the next, and its checkpoint is of no use
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
    return log.read_text()


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "step_time_s" in line]


def row(name: str, folder: Path, calibrated: Profile) -> list[str]:
    steps = steps_of(folder)
    warm = steps[len(steps) // 3 :]
    own = [line["step_time_s"] - line["data_wait_s"] for line in warm]
    sheet, measured = read_outcome(folder), read_outcome(folder, calibrated)
    median = float(np.median(own))

    def error(outcome: Outcome, profile: Profile) -> str:
        predicted = outcome.seconds(profile)
        return f"{predicted:.3f} ({predicted / median - 1:+.0%})"

    memory = sheet.predicted_bytes / 1e9
    mfus = [line["mfu"] * line["step_time_s"] / each for line, each in zip(warm, own, strict=True) if line["mfu"]]
    tokens = [line["tokens_per_second"] * line["step_time_s"] / each for line, each in zip(warm, own, strict=True)]
    return [
        name,
        spread(own),
        error(sheet, Profile()),
        error(measured, calibrated),
        f"{np.median(tokens):,.0f}",
        f"{np.median(mfus):.1%}" if mfus else "",
        f"{sheet.measured_bytes / 1e9:.1f}",
        f"{memory:.1f} ({memory / (sheet.measured_bytes / 1e9) - 1:+.0%})",
    ]


@app.command()
def main(
    cases: Annotated[list[str] | None, typer.Argument(help="names of runs; default: all")] = None,
    runs: Annotated[Path, typer.Option(help="folder of the runs")] = ROOT / "runs" / "gpu_training",
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a run is ended with this program
    recorder = Recorder("gpu_training", "Training steps on one GPU, measured and predicted")
    rows, failed, measured = [], {}, {}
    for name in cases or CASES:
        folder = runs / name.replace(" ", "_").replace(",", "")
        printed = train(CASES[name], folder)
        try:
            rows.append(row(name, folder, load_profile(PROFILE)))
            measured[name] = [{key: step[key] for key in SERIES} for step in steps_of(folder)]
        except (OSError, ValueError, IndexError):
            failed[name] = printed[-3000:]
            print(f"{name} failed:\n{failed[name]}", flush=True)
        recorder.write(HEADER, rows, NOTES, {"steps": measured, "failed": failed})


if __name__ == "__main__":
    app()
