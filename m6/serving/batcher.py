"""A bounded queue before a model that runs one batch at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Protocol

from m6.serving.batching import BatchPlanner

logger = logging.getLogger(__name__)


class Task(Protocol):
    """One kind of work that the model does on batches."""

    def length(self, job: Any) -> int:
        """What padding to the longest job of a batch is measured in."""

    def run(self, jobs: Sequence[Any]) -> Sequence[Any]:
        """The result of each job; called in one thread. A job's result does not depend on the others."""


class QueueFull(Exception):
    """As many requests wait as may."""


class DeadlinePassed(Exception):
    """A request was not done in time; if it was still waiting, it is never run."""


class Stopping(Exception):
    """The service is going down."""


@dataclass
class Counters:
    """What happened since the start, in requests but for ``batches``."""

    done: int = 0
    rejected: int = 0
    """because the queue was full"""
    expired: int = 0
    """because the deadline passed"""
    failed: int = 0
    """because the model raised an error"""
    batches: int = 0


@dataclass(eq=False)
class _Request:
    lane: str
    job: Any
    length: int
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Runs jobs in batches, as an asynchronous context.

    Whenever the model is free, the requests that wait for the same task as the oldest one are planned anew, and the
    batch with the oldest runs: so none waits forever, and what arrives meanwhile may join a later batch.

    Args:
        lanes: the tasks by name, each with its plan.
        max_waiting: requests that may wait; one more is refused.
    """

    def __init__(self, lanes: Mapping[str, tuple[Task, BatchPlanner]], max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.counters = Counters()
        self._lanes = dict(lanes)
        self._waiting: list[_Request] = []
        self._arrived = asyncio.Event()
        self._stopping = False
        # One thread: two batches at once would only slow each other down.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def __aenter__(self) -> Batcher:
        self._loop_task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets the batch that runs finish; the requests that wait end with Stopping."""
        self._stopping = True
        for request in self._waiting:
            _fail(request, Stopping("the service is stopping"))
        self._waiting.clear()
        self._arrived.set()
        await self._loop_task
        self._thread.shutdown()

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks."""
        return list(self._lanes)

    def status(self) -> dict[str, int]:
        """The length of the queue, its limit and the counters."""
        return {"waiting": len(self._waiting), "max_waiting": self.max_waiting, **asdict(self.counters)}

    async def submit(self, task: str, job: Any, deadline_s: float) -> Any:
        """The result of a job.

        Raises:
            QueueFull: at once.
            DeadlinePassed: after ``deadline_s``.
            Stopping: the service goes down.
            Exception: whatever the task raised for the batch.
        """
        if self._stopping:
            raise Stopping("the service is stopping")
        if len(self._waiting) >= self.max_waiting:
            self.counters.rejected += 1
            raise QueueFull(f"{self.max_waiting} requests are waiting, which is the most")
        request = _Request(task, job, self._lanes[task][0].length(job))
        self._waiting.append(request)
        self._arrived.set()
        try:
            return await asyncio.wait_for(request.answer, deadline_s)
        except asyncio.TimeoutError:
            self.counters.expired += 1
            raise DeadlinePassed(f"not done within {deadline_s:g} seconds") from None
        finally:  # also when the request is cancelled
            if request in self._waiting:
                self._waiting.remove(request)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                batch = self._take_batch()
                task, _ = self._lanes[batch[0].lane]
                self.counters.batches += 1
                try:
                    results = await loop.run_in_executor(self._thread, task.run, [request.job for request in batch])
                    answers = list(zip(batch, results, strict=True))
                except Exception as error:
                    # The batch is lost, the service is not: the next batch may be a good one.
                    logger.exception("a batch of %d requests for %s failed", len(batch), batch[0].lane)
                    self.counters.failed += len(batch)
                    for request in batch:
                        _fail(request, error)
                    continue
                for request, result in answers:
                    if not request.answer.done():
                        request.answer.set_result(result)
                        self.counters.done += 1

    def _take_batch(self) -> list[_Request]:
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
