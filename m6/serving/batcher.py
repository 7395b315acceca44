"""A bounded request queue in front of a model. One batch runs at a time.

Dynamic programming chooses the waiting requests of a batch by their lengths. The seconds that batches take are measured
while no request waits, and kept for the next start.

A batch is padded to its longest request. Large batches with mixed lengths waste time on padding; small batches waste
the parallelism of the device. TurboTransformers (arXiv 2010.05680) sorts the waiting requests by length and cuts the
sorted list at the points of least total time. With lengths l_1 <= ... <= l_n and t(l, b) the measured time of b
requests padded to l,

    T(0) = 0,    T(i) = min over 1 <= b <= min(i, max_batch_size) of T(i - b) + t(l_i, b)

in O(n max_batch_size). If t does not decrease with l, no other division into batches is faster, contiguous or not:
exchanging the other members of the longest request's batch for the next longest requests costs nothing there, and
shortens the other batches.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from m6 import files

BatchPlanner = Callable[[Sequence[int]], list[list[int]]]
"""Maps the lengths of n requests, in order of arrival, to batches of their indices."""


class CostTable:
    """The time t(l, b) of a batch: linear between measured points, constant outside of them.

    Measurements are noisy, so the table is made monotone in both arguments.

    Args:
        lengths: L measured lengths, increasing.
        batch_sizes: B measured batch sizes, increasing.
        seconds: [L, B] measured times.
    """

    def __init__(self, lengths: Sequence[int], batch_sizes: Sequence[int], seconds: NDArray[np.float64]) -> None:
        self.lengths, self.batch_sizes = list(lengths), list(batch_sizes)
        self.seconds = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
        sizes = np.arange(self.batch_sizes[-1] + 1)
        by_size = np.array([np.interp(sizes, self.batch_sizes, row) for row in self.seconds])
        all_lengths = np.arange(self.lengths[-1] + 1)
        self._table = np.array([np.interp(all_lengths, self.lengths, column) for column in by_size.T]).T

    def __call__(self, length: int, batch_size: int) -> float:
        """Returns the seconds of ``batch_size`` requests padded to ``length``."""
        longest, largest = self._table.shape
        return float(self._table[min(length, longest - 1), min(batch_size, largest - 1)])


def measure_costs(
    run: Callable[[int, int], object],
    lengths: Sequence[int],
    batch_sizes: Sequence[int],
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measures ``run(length, batch_size)`` at every point of the grid.

    Args:
        run: runs a batch of the given size and length.
        lengths: lengths of the grid, increasing.
        batch_sizes: batch sizes of the grid, increasing.
        repeats: runs per point; the least time is taken. One run before all others warms up.
        clock: returns seconds.
    """
    seconds = np.empty((len(lengths), len(batch_sizes)))
    run(lengths[0], batch_sizes[0])
    for row, length in enumerate(lengths):
        for column, batch_size in enumerate(batch_sizes):
            seconds[row, column] = least_seconds(run, length, batch_size, repeats, clock)
    return CostTable(lengths, batch_sizes, seconds)


def least_seconds(
    run: Callable[[int, int], object],
    length: int,
    batch_size: int,
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the least time of several runs: it is the closest to the time without interference."""
    times = []
    for _ in range(repeats):
        begin = clock()
        run(length, batch_size)
        times.append(clock() - begin)
    return min(times)


def cost_grid(shortest: int, longest: int, max_batch_size: int) -> tuple[list[int], list[int]]:
    """Returns the lengths and batch sizes to measure: three lengths, and powers of two up to the largest batch."""
    # Sets, because points coincide for small limits. The middle length is the geometric mean.
    lengths = {shortest, round((shortest * longest) ** 0.5), longest}
    sizes = {min(2**power, max_batch_size) for power in range(max_batch_size.bit_length() + 1)}
    return sorted(lengths), sorted(sizes)


def plan_by_length(
    lengths: Sequence[int], seconds: Callable[[int, int], float], max_batch_size: int
) -> list[list[int]]:
    """Returns the division into batches with the least total time.

    Args:
        lengths: lengths of n requests.
        seconds: t(l, b); it must not decrease with l.
        max_batch_size: most requests of a batch.

    Returns:
        The indices of each batch; batches and indices are sorted by length, shortest first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    total, begins = [0.0], [0]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        starts = range(max(0, end - max_batch_size), end)
        best, begin = min((total[start] + seconds(longest, end - start), start) for start in starts)
        total.append(best)
        begins.append(begin)
    # Follow the best cuts back from the longest request.
    batches: list[list[int]] = []
    end = len(order)
    while end:
        batches.append(order[begins[end] : end])
        end = begins[end]
    return batches[::-1]


def plan_by_arrival(lengths: Sequence[int], max_batch_size: int) -> list[list[int]]:
    """Returns full batches in order of arrival, without regard to lengths. It is the baseline of the benchmark."""
    return [
        list(range(begin, min(begin + max_batch_size, len(lengths))))
        for begin in range(0, len(lengths), max_batch_size)
    ]


Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class Task(Protocol):
    """A kind of request, served by the model in batches."""

    def length(self, job: Any) -> int:
        """Returns the length of a job. A batch is padded to its longest job."""

    def run(self, jobs: Sequence[Any]) -> Sequence[Any]:
        """Returns the result of each job. It is called in one thread; results must not depend on the other jobs."""


class QueueFull(Exception):
    """The queue holds ``max_waiting`` requests."""


class Stopping(Exception):
    """The service is shutting down."""


@dataclass
class Counters:
    """Counters since the start of the service."""

    done: int = 0
    """completed requests"""
    rejected: int = 0
    """requests refused because of a full queue"""
    expired: int = 0
    """requests beyond their deadline"""
    failed: int = 0
    """requests ended by an error of the model"""
    batches: int = 0
    """started batches"""


@dataclass(eq=False)
class _Request:
    lane: str
    job: Any
    length: int
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Runs jobs in batches. Use it as an asynchronous context manager.

    When the model is free, all waiting requests of the oldest request's lane are divided into batches, and the batch
    with the oldest request runs. So no request waits forever, and later requests can join the next batch.

    Args:
        lanes: tasks by name, each with its batch planner.
        max_waiting: most requests in the queue; further ones are rejected.
    """

    def __init__(self, lanes: Mapping[str, tuple[Task, BatchPlanner]], max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.counters = Counters()
        self._lanes = dict(lanes)
        self._waiting: list[_Request] = []
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.stopping = False
        # One thread: two batches at the same time would compete for the same device.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def __aenter__(self) -> Batcher:
        self._loop_task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the running batch. Waiting requests end with Stopping."""
        self.stopping = True
        for request in self._waiting:
            _fail(request, Stopping("the service is stopping"))
        self._waiting.clear()
        self._arrived.set()
        await self._loop_task
        self._thread.shutdown()

    @property
    def tasks(self) -> list[str]:
        """The names of the lanes."""
        return list(self._lanes)

    def status(self) -> dict[str, int]:
        """Returns the length of the queue, its limit and the counters."""
        return {"waiting": len(self._waiting), "max_waiting": self.max_waiting, **asdict(self.counters)}

    async def submit(self, task: str, job: Any) -> Any:
        """Queues a job and returns its result. If the caller is cancelled while the job waits, the job is not run.

        Args:
            task: name of the lane.
            job: argument of the lane's task.

        Raises:
            QueueFull: the queue is full; raised immediately.
            Stopping: the service is shutting down.
            Exception: the exception of the task for the job's batch.
        """
        if self.stopping:
            raise Stopping("the service is stopping")
        if len(self._waiting) >= self.max_waiting:
            self.counters.rejected += 1
            raise QueueFull(f"the queue is full: {self.max_waiting} requests are waiting")
        request = _Request(task, job, self._lanes[task][0].length(job))
        self._waiting.append(request)
        self._idle.clear()
        self._arrived.set()
        try:
            return await request.answer
        finally:
            if request in self._waiting:
                self._waiting.remove(request)

    async def when_idle(self, function: Callable[[], Result]) -> Result:
        """Calls a function in the model's thread once no request waits or runs. Later requests wait for its end."""
        await self._idle.wait()
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def replan(self, lane: str, plan: BatchPlanner) -> None:
        """Replaces the batch planner of a lane."""
        self._lanes[lane] = (self._lanes[lane][0], plan)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.stopping:
            await self._arrived.wait()
            self._arrived.clear()  # before the queue is read, so no arrival is missed
            while self._waiting:
                batch = self._take_batch()
                task, _ = self._lanes[batch[0].lane]
                self.counters.batches += 1
                try:
                    results = await loop.run_in_executor(self._thread, task.run, [request.job for request in batch])
                    answers = list(zip(batch, results, strict=True))
                except Exception as error:
                    # Only this batch fails; the service goes on with the next one.
                    logger.exception("a batch of %d requests for %s failed", len(batch), batch[0].lane)
                    self.counters.failed += len(batch)
                    for request in batch:
                        _fail(request, error)
                    continue
                for request, result in answers:
                    if not request.answer.done():  # otherwise its deadline passed
                        request.answer.set_result(result)
                        self.counters.done += 1
            self._idle.set()

    def _take_batch(self) -> list[_Request]:
        """Removes the batch with the oldest request from the queue."""
        lane = self._waiting[0].lane
        candidates = [request for request in self._waiting if request.lane == lane]
        _, plan = self._lanes[lane]
        indices = next(batch for batch in plan([request.length for request in candidates]) if 0 in batch)
        batch = [candidates[index] for index in indices]
        self._waiting = [request for request in self._waiting if request not in batch]
        return batch


def _fail(request: _Request, error: Exception) -> None:
    if not request.answer.done():
        request.answer.set_exception(error)


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
        file = files.cache_folder() / "serving" / f"{_key_of_costs(task, lengths, batch_sizes)}.json"
        seconds = _read_costs(file, (len(lengths), len(batch_sizes)))
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


def _key_of_costs(task: MeasuredTask, lengths: Sequence[int], batch_sizes: Sequence[int]) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    machine = [platform.node(), device, torch.get_num_threads(), torch.__version__]
    conditions = json.dumps([task.identity(), lengths, batch_sizes, machine], sort_keys=True)
    return hashlib.sha256(conditions.encode()).hexdigest()


def _read_costs(file: Path, shape: tuple[int, int]) -> NDArray[np.float64] | None:
    try:
        seconds = np.array(json.loads(file.read_text(encoding="utf-8")), dtype=np.float64)
    except (OSError, ValueError, TypeError):
        return None
    return seconds if seconds.shape == shape and np.isfinite(seconds).all() and (seconds > 0).all() else None
