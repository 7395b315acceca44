"""The queue before the model, with a task that does what the test tells it."""

import asyncio
import functools
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from m6.serving.batcher import Batcher, BatchPlanner, QueueFull, Stopping, plan_by_arrival, plan_by_length

LONG = 30.0  # seconds that no test waits for


class Doubling:
    """Doubles numbers once the test opens the gate; a number's length is the number."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.entered = threading.Event()

    def length(self, job: int) -> int:
        return job

    def run(self, jobs: Sequence[int]) -> list[int]:
        self.batches.append(list(jobs))
        self.entered.set()
        assert self.gate.wait(LONG)
        if 13 in jobs:
            raise RuntimeError("unlucky")
        return [2 * job for job in jobs]


BY_ARRIVAL = functools.partial(plan_by_arrival, max_batch_size=4)


def run(scenario: Any, *, max_waiting: int = 8, plan: BatchPlanner = BY_ARRIVAL) -> Any:
    """Runs scenario(batcher, task) in a loop of its own."""

    async def main() -> Any:
        task = Doubling()
        async with Batcher({"double": (task, plan)}, max_waiting) as batcher:
            try:
                return await scenario(batcher, task)
            finally:
                task.gate.set()

    return asyncio.run(asyncio.wait_for(main(), LONG))


async def occupied(batcher: Batcher, task: Doubling) -> asyncio.Task[int]:
    """Sends a job that runs until the gate opens."""
    first = asyncio.create_task(batcher.submit("double", 1))
    await asyncio.to_thread(task.entered.wait, LONG)
    return first


async def waiting(batcher: Batcher, *jobs: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(batcher.submit("double", job)) for job in jobs]
    await asyncio.sleep(0)
    return tasks


def test_what_waits_runs_together_by_the_plan():
    async def scenario(batcher: Batcher, task: Doubling) -> None:
        first = await occupied(batcher, task)
        rest = await waiting(batcher, 90, 2, 100, 3)
        task.gate.set()
        assert await asyncio.gather(first, *rest) == [2, 180, 4, 200, 6]
        # The oldest request's batch goes first.
        assert task.batches == [[1], [90, 100], [2, 3]]
        assert batcher.status()["done"] == 5
        assert batcher.status()["batches"] == 3

    run(
        scenario,
        plan=functools.partial(plan_by_length, seconds=lambda length, size: 20 + length * size, max_batch_size=4),
    )


def test_a_full_queue_refuses_at_once():
    async def scenario(batcher: Batcher, task: Doubling) -> None:
        await occupied(batcher, task)
        rest = await waiting(batcher, 2, 3)
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            await batcher.submit("double", 4)
        task.gate.set()
        assert await asyncio.gather(*rest) == [4, 6]
        assert await batcher.submit("double", 4) == 8
        assert batcher.status()["rejected"] == 1

    run(scenario, max_waiting=2)


def test_a_cancelled_request_leaves_the_queue():
    async def scenario(batcher: Batcher, task: Doubling) -> None:
        await occupied(batcher, task)
        gone, stays = await waiting(batcher, 2, 3)
        gone.cancel()
        await asyncio.wait([gone])
        assert batcher.status()["waiting"] == 1
        task.gate.set()
        assert await stays == 6
        assert task.batches == [[1], [3]]

    run(scenario)


def test_a_batch_that_fails_ends_its_own_requests_only():
    async def scenario(batcher: Batcher, task: Doubling) -> None:
        task.gate.set()
        with pytest.raises(RuntimeError, match="unlucky"):
            await batcher.submit("double", 13)
        assert await batcher.submit("double", 3) == 6
        assert batcher.status()["failed"] == 1

    run(scenario)


def test_other_work_of_the_model_waits_until_no_request_waits():
    async def scenario(batcher: Batcher, task: Doubling) -> None:
        first = await occupied(batcher, task)
        (second,) = await waiting(batcher, 2)
        work = asyncio.create_task(batcher.when_idle(lambda: list(task.batches)))
        await asyncio.sleep(0.05)
        assert not work.done()
        task.gate.set()
        assert await work == [[1], [2]]
        assert await asyncio.gather(first, second) == [2, 4]
        assert await batcher.when_idle(lambda: 5) == 5

    run(scenario)


def test_a_lane_gets_another_plan():
    async def scenario(batcher: Batcher, task: Doubling) -> None:
        first = await occupied(batcher, task)
        rest = await waiting(batcher, 2, 3)
        batcher.replan("double", functools.partial(plan_by_arrival, max_batch_size=1))
        task.gate.set()
        await asyncio.gather(first, *rest)
        assert task.batches == [[1], [2], [3]]

    run(scenario)


def test_stopping_finishes_what_runs_and_ends_what_waits():
    async def main() -> None:
        task = Doubling()
        async with Batcher({"double": (task, BY_ARRIVAL)}, 8) as batcher:
            first = await occupied(batcher, task)
            (second,) = await waiting(batcher, 2)
            asyncio.get_running_loop().call_later(0.05, task.gate.set)
        assert await first == 2
        with pytest.raises(Stopping):
            await second
        with pytest.raises(Stopping):
            await batcher.submit("double", 3)
        assert task.batches == [[1]]

    asyncio.run(asyncio.wait_for(main(), LONG))
