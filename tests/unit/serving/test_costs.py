"""The costs of batches are measured while the service runs, once per machine."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from m6 import files
from m6.serving.batcher import Batcher, cost_grid, plan_by_arrival, plan_by_costs


class Lengths:
    """A task whose identity the test sets."""

    max_length = 9

    def __init__(self, name: str = "a") -> None:
        self.name = name
        self.measured: list[tuple[int, int]] = []

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

    def length(self, job: int) -> int:
        return job

    def run(self, jobs: Sequence[int]) -> Sequence[int]:
        return jobs

    def run_synthetic(self, length: int, batch_size: int) -> None:
        self.measured.append((length, batch_size))


def plan(task: Lengths) -> Any:
    """The planner of the task's lane once its batches are measured."""

    async def main() -> Any:
        async with Batcher({"lane": (task, lambda lengths: plan_by_arrival(lengths, 4))}, 8) as batcher:
            await plan_by_costs(batcher, {"lane": task}, 4)  # type: ignore[dict-item]
            assert await batcher.submit("lane", 5) == 5
            return batcher._lanes["lane"][1]

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return files.cache_folder() / "serving"


def test_every_point_is_measured_once_per_machine(cache: Path):
    first, again, other = Lengths(), Lengths(), Lengths("b")
    costs = plan(first).keywords["seconds"].seconds
    lengths, sizes = cost_grid(1, 9, 4)
    points = [(length, size) for length in lengths for size in sizes]
    assert first.measured == [points[0], *(point for point in points for _ in range(2))]
    assert (plan(again).keywords["seconds"].seconds == costs).all()
    assert not again.measured
    plan(other)
    assert other.measured
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("content", ["", "[[1]]", "[[NaN, 1, 1], [1, 1, 1], [1, 1, 1]]", '{"a": 1}', "[[0,0,0]]"])
def test_a_damaged_record_is_measured_again(cache: Path, content: str):
    plan(Lengths())
    (record,) = cache.iterdir()
    record.write_text(content, encoding="utf-8")
    task = Lengths()
    plan(task)
    assert task.measured
    task = Lengths()
    plan(task)
    assert not task.measured


def test_without_a_cache_folder_or_without_a_measurement_the_service_goes_on(cache: Path, caplog: Any):
    cache.parent.write_text("no folder", encoding="utf-8")
    assert "seconds" in plan(Lengths()).keywords
    assert "measured again at the next start" in caplog.text

    class TooLarge(Lengths):
        def run_synthetic(self, length: int, batch_size: int) -> None:
            raise RuntimeError("out of memory")

    assert plan(TooLarge())([1, 2]) == [[0, 1]]
    assert "planned by arrival" in caplog.text
