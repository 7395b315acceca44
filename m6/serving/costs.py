"""Measures the cost of batches while the service runs, and keeps the result for the next start."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from m6 import files
from m6.serving.batcher import Batcher, CostTable, Task, cost_grid, least_seconds, plan_by_length

logger = logging.getLogger(__name__)


class MeasuredTask(Task, Protocol):
    """A task with synthetic batches, so it can be measured without requests."""

    @property
    def max_length(self) -> int:
        """Largest length of a job."""

    def run_synthetic(self, length: int, batch_size: int) -> None:
        """Runs a batch of jobs of one length."""

    def identity(self) -> dict[str, Any]:
        """Returns all parameters of a batch's cost, as JSON values."""


async def plan_by_costs(batcher: Batcher, tasks: dict[str, MeasuredTask], max_batch_size: int) -> None:
    """Measures the batches of each lane while no request waits, then plans the lane by length.

    Earlier measurements with the same model, library and device are taken from the user's cache folder.

    Args:
        batcher: the running queue.
        tasks: the tasks of its lanes, by name.
        max_batch_size: most requests of a batch.
    """
    for lane, task in tasks.items():
        lengths, batch_sizes = cost_grid(1, task.max_length, max_batch_size)
        file = files.cache_folder() / "serving" / f"{_key(task, lengths, batch_sizes)}.json"
        seconds = _read(file, (len(lengths), len(batch_sizes)))
        if seconds is None:
            try:
                seconds = await _measure(batcher, task, lengths, batch_sizes)
            except Exception:  # such as a batch too large for the memory of the device
                logger.exception("batches for %s cannot be measured: they are planned by arrival", lane)
                continue
            try:
                files.write_json(file, seconds.tolist(), mode=0o600)
            except OSError as error:
                logger.warning("the costs of batches are measured again at the next start: %s: %s", file, error)
        costs = CostTable(lengths, batch_sizes, seconds)
        batcher.replan(lane, functools.partial(plan_by_length, seconds=costs, max_batch_size=max_batch_size))


async def _measure(
    batcher: Batcher, task: MeasuredTask, lengths: Sequence[int], batch_sizes: Sequence[int]
) -> NDArray[np.float64]:
    await batcher.when_idle(functools.partial(task.run_synthetic, lengths[0], batch_sizes[0]))  # warms up
    seconds = np.empty((len(lengths), len(batch_sizes)))
    for row, length in enumerate(lengths):
        for column, size in enumerate(batch_sizes):
            point = functools.partial(least_seconds, task.run_synthetic, length, size)
            seconds[row, column] = await batcher.when_idle(point)
    return seconds


def _key(task: MeasuredTask, lengths: Sequence[int], batch_sizes: Sequence[int]) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    machine = [platform.node(), device, torch.get_num_threads(), torch.__version__]
    conditions = json.dumps([task.identity(), lengths, batch_sizes, machine], sort_keys=True)
    return hashlib.sha256(conditions.encode()).hexdigest()


def _read(file: Path, shape: tuple[int, int]) -> NDArray[np.float64] | None:
    try:
        seconds = np.array(json.loads(file.read_text(encoding="utf-8")), dtype=np.float64)
    except (OSError, ValueError, TypeError):
        return None
    return seconds if seconds.shape == shape and np.isfinite(seconds).all() and (seconds > 0).all() else None
