"""What a run under Slurm survives, and what looking after it costs; README.md says how to read it."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from record import ROOT, Recorder, spread

from tests.slurm.cluster import LocalCluster, why_not
from tests.slurm.kills import INTERVAL, MOMENTS, kill_at_random, steps_for, summary
from tests.slurm.run import ClusterRun, jobs_go_to

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def soak(kills: int = 50, seed: int = 1) -> None:
    """kill -9 of all ranks of one run at random moments; it has to end as the run that was left alone."""
    recorder = Recorder("slurm_soak", "Kills at random moments of one run on a local Slurm cluster")
    if reason := why_not():
        raise SystemExit(f"error: {reason}")
    with tempfile.TemporaryDirectory(prefix="m6_soak_") as name:
        folder = Path(name)
        cluster = LocalCluster(folder / "cluster")
        try:
            cluster.start()
            with jobs_go_to(cluster, folder):
                numbers = _soak(cluster, folder, kills, seed)
        finally:
            cluster.stop()
    recoveries = [one["first_step_after_s"] for one in numbers["each"] if one["first_step_after_s"] is not None]
    rows = [
        ["kills: " + ", ".join(f"{numbers['moments'][name]} {name}" for name in MOMENTS), str(kills)],
        ["runs that did not go on from the newest complete checkpoint", str(numbers["failures"])],
        ["losses of the curve that differ from the run that was left alone", str(numbers["differences"])],
        ["steps done again after a kill", spread([one["lost_steps"] for one in numbers["each"]], ".0f")],
        ["most steps done again", str(numbers["lost_steps_max"])],
        ["s from a kill to the end of the first new step", spread(recoveries, ".1f")],
        ["longest", f"{max(recoveries):.1f}"],
    ]
    notes = (
        f"Two ranks on two virtual nodes, {steps_for(kills)} steps, a checkpoint every {INTERVAL}; medians, with the\n"
        "10th and 90th percentile in brackets. The run restarts within its allocation: no delay of Slurm's own is in\n"
        f"the times; {len(recoveries)} of the {kills} next attempts came to a step before they were killed too."
    )
    recorder.write(["", ""], rows, notes, numbers)


def _soak(cluster: LocalCluster, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    changes = {"m6__training__total_steps": steps_for(kills), "m6__checkpoint__interval_steps": INTERVAL}
    whole, killed = (ClusterRun(cluster, folder, name, "", **changes) for name in ("whole", "killed"))
    killed.submit()
    done = kill_at_random(killed, kills, seed)
    whole.submit()
    whole.wait_for_end()
    ours, theirs = killed.curve(), whole.curve()
    differences = sum(a != b for a, b in zip(ours, theirs, strict=False)) + abs(len(ours) - len(theirs))
    failures = sum(one.resumed_at != one.checkpoint for one in done)
    return {"failures": failures, "differences": differences, **summary(done)}


@app.command()
def overhead(
    config: Annotated[Path, typer.Option(help="the run's JSON")] = Path("configs/m6_smoke.json"),
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, overrides a value")] = None,
    steps: int = 60,
) -> None:
    """The share of a step that goes to stop wishes, progress, metrics, and on the first node the watchdog."""
    from m6.config.run import load_config
    from m6.runs.directory import RunDirectory
    from m6.runs.processes import start
    from m6.training.loop import Trainer

    recorder = Recorder("slurm_overhead", "What looking after a run costs")
    fixed = (f"m6.training.total_steps={steps}", "m6.evaluation.interval_steps=100000", "m6.data.num_workers=0")
    settings = load_config(config, (*(overrides or ()), *fixed, "m6.checkpoint.interval_steps=100000"))
    spent: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="m6_overhead_") as folder:
        run = RunDirectory(Path(folder) / "run")
        runtime = start()
        run.open(settings, runtime.world_size)
        trainer = Trainer(settings, run, runtime)
        for name in ("_read_requests", "_write_progress", "_track"):
            setattr(trainer, name, _timed(getattr(trainer, name), name, spent))
        step_times: list[float] = []
        step = trainer.train_step
        health = step.health

        def timed_step(*arguments: Any) -> Any:
            begin = time.perf_counter()
            outcome = step(*arguments)
            step_times.append(time.perf_counter() - begin)
            return outcome

        timed_step.health = health  # type: ignore[attr-defined]
        trainer.train_step = timed_step  # type: ignore[assignment]
        trainer.train()
    total = sum(step_times)
    watchdog_s = _watchdog_round_s()
    labels = {
        "_read_requests": "stop and save requests",
        "_write_progress": "progress file",
        "_track": "metrics and trackers",
    }
    rows = [[labels[name], f"{1e3 * spent[name] / steps:.3f}", f"{spent[name] / total:.3%}"] for name in labels]
    rows.append(["the three", f"{1e3 * sum(spent.values()) / steps:.3f}", f"{sum(spent.values()) / total:.3%}"])
    rows.append(["watchdog, CPU of one core on the first node", "", f"{watchdog_s / 15:.3%}"])
    notes = (
        f"`{config}`, {steps} steps on one rank; a step takes {spread(step_times)} s (median, 10th and 90th\n"
        f"percentile). A round of the watchdog takes {1e3 * watchdog_s:.1f} ms, every 15 s."
    )
    numbers = {"step_times_s": step_times, "spent_s": spent, "watchdog_round_s": watchdog_s}
    recorder.write(["", "ms a step", "share"], rows, notes, numbers)


def _timed(function: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin

    return wrapper


def _watchdog_round_s() -> float:
    """Wall time of what the watchdog does between two naps, from the script itself."""
    rounds = 200
    script = (
        f"source {ROOT}/scripts/slurm/lib/watchdog.sh; n=0; sleep() {{ ((n++ < {rounds})); }}; "
        "STEP_PID=$$ RUN_DIR=/tmp WATCH_INTERVAL_S=15 STEP_STARTED=$(date +%s); "
        "STEP_TIMEOUT_S=900 START_TIMEOUT_S=1800; watch_step"
    )
    begin = time.perf_counter()
    subprocess.run(["bash", "-c", script], check=False)
    return (time.perf_counter() - begin) / rounds


if __name__ == "__main__":
    app()
