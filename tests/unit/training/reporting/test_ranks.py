"""The slowest rank: its own time is what it does not wait for others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from m6.runs.processes import Runtime
from m6.training.reporting import ranks
from m6.training.reporting.ranks import RankTimes


def test_waits_for_other_ranks_are_not_a_ranks_own_time(monkeypatch: pytest.MonkeyPatch):
    """Two steps: data takes 2 s, a collective 30 s, the rest 5 s; the other rank needs 8 s, 3 of them for data."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(ranks, "time", clock)

    def wait(work: object) -> str:
        clock.now += 30.0
        return "done"

    def all_gather(times: list[torch.Tensor], own: torch.Tensor) -> None:
        times[0].copy_(own)
        times[1].copy_(torch.tensor([8.0, 3.0]))

    monkeypatch.setattr(dist.Work, "wait", wait)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    times = RankTimes(Runtime(0, 2, 0, torch.device("cpu"), ("a", "b")))

    def step(data_s: float) -> None:
        times.begin_step()
        clock.now += data_s
        times.has_data()
        assert dist.Work.wait(None) == "done"
        clock.now += 5.0
        times.end_step()

    with times:
        step(2.0)
        step(2.0)
        dist.Work.wait(None)  # between steps
        expected: dict[str, Any] = {"rank": 1, "node": "b", "step_time_s": 8.0, "data_wait_s": 3.0}
        assert times.slowest() == {"slowest_rank": {**expected, "mean_step_time_s": 7.5}}
        step(4.0)
        expected = {"rank": 0, "node": "a", "step_time_s": 9.0, "data_wait_s": 4.0}
        assert times.slowest() == {"slowest_rank": {**expected, "mean_step_time_s": 8.5}}
    assert dist.Work.wait is wait


def test_a_single_rank_is_not_compared():
    assert RankTimes(Runtime(0, 1, 0, torch.device("cpu"))).slowest() == {}
