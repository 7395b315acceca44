"""Hashes of a short run on 1 to 7 ranks, plain and with ``"deterministic": "any_world"``, and through kills.

PYTHONPATH=. python scripts/benchmarks/any_world_hashes.py [CONFIG]      (default: configs/m6_smoke.json)

It needs the data of the configuration, by default that of scripts/smoke.sh.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from m6.checkpoints.comparison import compare, open_step
from m6.runs.directory import RunDirectory
from scripts.benchmarks.record import Recorder

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
SHORT = (
    f"m6.training.total_steps={STEPS}",
    "m6.schedule.warmup_steps=3",
    "m6.pseudo_to_real.switch_step=6",
    "m6.checkpoint.interval_steps=2",
    "m6.logging.interval_steps=1",
    "m6.model.hidden_dropout=0.1",
    "m6.moe.capacity_factor=1.25",
    "train_batch_size=64",
    "train_micro_batch_size_per_gpu=8",
)
ANY = "m6.training.deterministic=any_world"
# torchrun gives one thread to each of several ranks, and all threads to a single one, whose sums then have other bits.
os.environ["OMP_NUM_THREADS"] = "1"
Attempt = tuple[int, int, int | None]
"""(ranks, ZeRO stage, step after which all ranks are killed)."""
ADAMW = ("optimizer.type=AdamW", 'optimizer.params={"lr": 0.003}')
AUTOCAST = ("torch_autocast.enabled=true", "torch_autocast.dtype=bfloat16")
RUNS: dict[str, tuple[tuple[str, ...], tuple[Attempt, ...]]] = {
    **{f"plain, ranks: {ranks}": ((), ((ranks, 1, None),)) for ranks in (1, 2, 4)},
    **{f"ranks: {ranks}, ZeRO {stage}": ((ANY,), ((ranks, stage, None),)) for stage in (0, 1) for ranks in (1, 2, 4)},
    **{f"ranks: {ranks}, ZeRO 1": ((ANY,), ((ranks, 1, None),)) for ranks in (3, 5, 6, 7)},
    "ranks: 4, 3, 2, 4, 1, killed after steps 3, 5, 7, 9": (
        (ANY,),
        ((4, 1, 3), (3, 1, 5), (2, 1, 7), (4, 1, 9), (1, 0, None)),
    ),
    **{f"bf16, ranks: {ranks}": ((ANY, "bf16.enabled=true"), ((ranks, 1, None),)) for ranks in (1, 4)},
    **{f"autocast, AdamW, ranks: {ranks}": ((ANY, *AUTOCAST, *ADAMW), ((ranks, 1, None),)) for ranks in (1, 4)},
    **{f"ep_size 2, ranks: {ranks}": ((ANY, "m6.training.ep_size=2"), ((ranks, 1, None),)) for ranks in (2, 4)},
}


def attempt(config: Path, run: Path, ranks: int, overrides: tuple[str, ...], killed_after: int | None) -> None:
    """Trains on ``ranks`` processes to the end, or kills them all with SIGKILL once a step is done."""
    options = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", "m6", "pretrain"]
    log = run.parent / f"{run.name}.log"
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*command, str(config), "--run-dir", str(run), *options], stdout=file, stderr=file, start_new_session=True
        )
        while process.poll() is None:
            if killed_after is not None and last_step(run) >= killed_after:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                time.sleep(1)
                return
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text(encoding='utf-8')[-3000:]}")


def last_step(run: Path) -> int:
    """The last step of which the run has logged a line."""
    directory = RunDirectory(run)
    return max((entry["step"] for entry in directory.read_metrics()), default=0) if directory.metrics.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "m6_smoke.json")
    arguments = parser.parse_args()
    recorder = Recorder("any_world_hashes", "The same bits on any number of ranks")
    table, hashes = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (changes, attempts)) in enumerate(RUNS.items()):
            run = Path(folder) / str(number)
            for ranks, stage, killed_after in attempts:
                overrides = (*SHORT, *changes, f"zero_optimization.stage={stage}")
                attempt(arguments.config, run, ranks, overrides, killed_after)
            found = compare(*open_step((run, run), STEPS))
            hashes[name] = found.digests[0]
            table.append([name, f"`{found.digests[0][:16]}`", str(found.num_tensors)])
    notes = f"""\
SHA-256 of all weights and moments after {STEPS} steps of `{arguments.config.name}`, batches of 64 in micro-batches of
8, dropout of 0.1, a capacity of 1.25, clipping, Muon where nothing else is said, and a Pseudo stage of 6 steps. Tensors
are in fp32 and ordered by name, as in `m6 verify`. Kills are SIGKILL to all processes."""
    recorder.write(["run", "SHA-256", "tensors"], table, notes, {"sha256": hashes})


if __name__ == "__main__":
    main()
