"""Trains the same six small runs with two trees of this repository and compares them to the bit.

    python scripts/benchmarks/golden_runs.py BEFORE [AFTER] --data data/smoke

BEFORE and AFTER are checkouts (default of AFTER: this one). The runs are configs/m6_smoke.json for 24 steps, the switch
from Pseudo to Real among them, under the layouts that differ in the code they take. ``--data`` is the data folder that
``bash scripts/smoke.sh`` builds, with its tokenizer. Compared are losses, norms and validation of every step, and the
SHA-256 of the weights and moments of the last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from m6.formatting import markdown_table

ROOT = Path(__file__).resolve().parents[2]
COMMON = {
    "m6.training.total_steps": 24,
    "m6.schedule.warmup_steps": 4,
    "m6.pseudo_to_real.switch_step": 8,
    "m6.logging.interval_steps": 1,
    "m6.evaluation.interval_steps": 12,
    "m6.evaluation.num_rows": 32,
    "m6.checkpoint.interval_steps": 100,
}
OFFLOAD = '{"device_budget_mib": 320}'
# Name -> (ranks, changes of the configuration).
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ZeRO 1 in bfloat16": (1, {"zero_optimization.stage": 1, "bf16.enabled": "true"}),
    "experts on two ranks": (2, {"train_micro_batch_size_per_gpu": 8, "m6.training.ep_size": 2}),
    "offloaded experts on two ranks": (
        2,
        {
            "train_micro_batch_size_per_gpu": 8,
            "m6.training.ep_size": 2,
            "zero_optimization.stage": 1,
            "zero_optimization.reduce_bucket_size": 1_000_000,
            "m6.offload": OFFLOAD,
        },
    ),
    # At stage 3 no rank has a whole matrix, as Muon needs.
    "ZeRO 3 on two ranks": (
        2,
        {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization.stage": 3,
            "optimizer": '{"type": "AdamW", "params": {"lr": 0.001}}',
        },
    ),
    "ZeRO 2, accumulation, checkpointing": (
        2,
        {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization.stage": 2,
            "m6.training.activation_checkpointing": "true",
            "m6.training.ep_size": 2,
        },
    ),
}
COMPARED = ("step", "loss", "aux_loss", "objectives", "grad_norm", "learning_rate", "validation", "tokens_seen")


def train(tree: Path, name: str, folder: Path, data: Path) -> None:
    """Trains one run with the code of ``tree`` in ``folder``."""
    ranks, changes = RUNS[name]
    settings = {**COMMON, "m6.data.path": data, "m6.data.tokenizer": data / "tokenizer", **changes}
    # Sums over threads depend on their number.
    pretrain(tree, tree / "configs" / "m6_smoke.json", folder, settings, ranks, {"OMP_NUM_THREADS": "1"})


def pretrain(
    tree: Path,
    config: Path,
    folder: Path,
    settings: dict[str, Any],
    ranks: int = 1,
    environment: dict[str, str] | None = None,
) -> None:
    """Trains a JSON with changed settings, by the code of ``tree``, in ``folder``."""
    module = "m6" if (tree / "m6" / "__main__.py").exists() else "m6.cli"
    launcher = (
        ["-m", module] if ranks == 1 else ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "-m", module]
    )
    overrides = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    command = [sys.executable, *launcher, "pretrain", str(config), "--run-dir", str(folder), *overrides]
    variables = {**os.environ, "PYTHONPATH": str(tree), **(environment or {})}
    ended = subprocess.run(command, env=variables, cwd=tree, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{shlex.join(command)}, in {tree}: {ended.stderr.strip()[-500:]}")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The compared figures of every line."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [{key: line[key] for key in COMPARED if key in line} for line in lines]


def checksums(folder: Path) -> dict[str, str]:
    """Of the shards of the last checkpoint."""
    last = max((folder / "checkpoints").glob("step_*"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(last.glob("*.safetensors"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "smoke")
    arguments = parser.parse_args()
    rows, equal = [], True
    with tempfile.TemporaryDirectory(prefix="golden_runs_") as temporary:
        for name in RUNS:
            folders = [Path(temporary, side, name.replace(" ", "_")) for side in ("before", "after")]
            for tree, folder in zip((arguments.before, arguments.after), folders, strict=True):
                train(tree.resolve(), name, folder, arguments.data.resolve())
            figures = metrics(folders[0]) == metrics(folders[1])
            weights = checksums(folders[0]) == checksums(folders[1])
            equal = equal and figures and weights
            rows.append([name, *("equal" if same else "DIFFERENT" for same in (figures, weights))])
    print(markdown_table(["run", "figures of every step", "weights and moments"], rows, "lll"))
    sys.exit(not equal)


if __name__ == "__main__":
    main()
