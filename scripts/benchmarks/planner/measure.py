"""Measures the cases by real runs of ``m6 pretrain``: ``python -m scripts.benchmarks.planner.measure``.

Every run is a row of results/planner_cpu.csv. Rounds go over the cases in an order of their own; what is there is not
measured again. Ranks are forked from this process, which has imported everything, and so start in no time. They count
as many pages of files as this process has, which is still 0.1 GB less than ranks that imported by themselves.

The time of a step is processor time, since a machine with other work stretches the time on the wall: that of the
busiest rank, or of all ranks over the cores where these are fewer. A quiet machine adds to it what ranks wait for.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from m6.config.deepspeed import prepare_deepspeed
from m6.config.run import load_config
from m6.files import write_json
from m6.runs.data import open_data
from m6.training.sizes import BatchShape
from scripts.benchmarks.planner.cases import CASES, CONFIG, Case
from scripts.benchmarks.planner.rank import FILE_PAGES, resident_bytes, run_rank
from scripts.benchmarks.record import RESULTS
from scripts.experiments.experiment import ResultTable

TABLE = ResultTable(RESULTS / "planner_cpu.csv", ("case", "round"))


def main(
    rounds: int = 2,
    runs: Annotated[int, typer.Option(help="stop after so many runs")] = 1000,
    only: Annotated[str, typer.Option(help="cases whose names contain this")] = "",
) -> None:
    """Measures what is missing of the first ROUNDS rounds."""
    prepare_deepspeed()
    import deepspeed  # noqa: F401 - before the ranks are forked

    for number in range(rounds):
        cases = [case for case in CASES if only in case.name]
        random.Random(number).shuffle(cases)
        for case in cases:
            if TABLE.holds({"case": case.name, "round": number}):
                continue
            if runs == 0:
                return
            runs -= 1
            row = measure(case, number)
            TABLE.append(row)
            print({key: row[key] for key in ("case", "step_s", "wall_s", "memory_bytes", "load")}, flush=True)


def measure(case: Case, number: int) -> dict[str, Any]:
    """One run of ``case``."""
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="m6-planner-"))
    begin = time.perf_counter()
    try:
        ranks = _run(case, folder)
        steps = list(zip(*ranks, strict=True))[1:]
        cores = len(os.sched_getaffinity(0))
        seconds = [_step_s([rank["cpu_s"] for rank in step], cores) for step in steps]
        return {
            "case": case.name,
            "round": number,
            **case.columns(),
            **_shape(case, folder),
            "cores": cores,
            "step_s": statistics.median(seconds),
            "steps_s": " ".join(f"{value:.4f}" for value in seconds),
            "wall_s": min(max(rank["wall_s"] for rank in step) for step in steps),
            "memory_bytes": max(rank["memory_bytes"] for step in steps for rank in step),
            "load": round((load + os.getloadavg()[0]) / 2, 1),
            "run_s": round(time.perf_counter() - begin, 1),
            "date": time.strftime("%Y-%m-%d %H:%M"),
        }
    finally:
        shutil.rmtree(folder)


def _step_s(cpu_s: list[float], cores: int) -> float:
    return max(*cpu_s, sum(cpu_s) / cores) if len(cpu_s) > 1 else cpu_s[0]


def _run(case: Case, folder: Path) -> list[list[dict[str, float]]]:
    """Steps of every rank."""
    world = case.layout.world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["pretrain", CONFIG, "--run-dir", str(folder / "run")]
    for key, value in case.overrides().items():
        arguments += ["--set", f"{key}={json.dumps(value)}"]
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), FILE_PAGES: str(resident_bytes()["RssFile"])}
    children: dict[int, int] = {}
    try:
        for rank in range(world):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            children[_fork(lambda e=environment: _be(e, folder, arguments), folder / f"output_{rank}")] = rank  # type: ignore[misc]
        while children:
            pid, status = os.wait()
            rank = children.pop(pid)
            if status:
                raise RuntimeError(f"{case.name}, rank {rank}:\n{(folder / f'output_{rank}').read_text()}")
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [json.loads((folder / f"rank_{rank}.json").read_text())["steps"] for rank in range(world)]


def _be(environment: dict[str, str], folder: Path, arguments: list[str]) -> None:
    os.environ.update(environment)
    run_rank(folder, arguments)


def _fork(function: Callable[[], None], output: Path) -> int:
    """Calls ``function`` in a child whose output goes to a file; returns its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            function()
            code = 0
    except SystemExit as error:
        code = int(bool(error.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _shape(case: Case, folder: Path) -> dict[str, int]:
    """What ``m6 pretrain`` predicts with: the largest of its first four micro-batches."""

    def write() -> None:
        settings = tuple(f"{key}={json.dumps(value)}" for key, value in case.overrides().items())
        data = open_data(load_config(Path(CONFIG), settings))
        shape = BatchShape.of(*(data.micro_batch(index) for index in range(4)))
        write_json(folder / "shape.json", asdict(shape))

    _, status = os.waitpid(_fork(write, folder / "output_shape"), 0)
    if status:
        raise RuntimeError((folder / "output_shape").read_text())
    return json.loads((folder / "shape.json").read_text())


if __name__ == "__main__":
    typer.run(main)
