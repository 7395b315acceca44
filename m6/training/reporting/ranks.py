"""Finds the slowest rank. The other ranks wait for it, so the time of a step alone does not show it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from m6.runs.processes import Runtime


class RankTimes:
    """Measures this rank's own time in a step: the step without waits for collectives and messages.

    This context times every wait for work of torch.distributed: on a CPU with the host's clock. On a GPU the host does
    not wait, so events in the compute stream time the wait. Collectives in another stream, overlapped with the backward
    pass, do not count as waits. The measurement does not synchronise the device; only ``slowest`` calls a collective.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._wait = dist.Work.wait
        self._begin = 0.0
        self._inside = False
        self._restart()

    def _restart(self) -> None:
        self._own_s = self._data_s = 0.0
        self._steps = 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> RankTimes:
        times, wait = self, self._wait

        def timed(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            return times._timed(lambda: wait(work, *args, **kwargs)) if times._inside else wait(work, *args, **kwargs)

        if self._runtime.world_size > 1:
            dist.Work.wait = timed  # type: ignore[method-assign,assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        dist.Work.wait = self._wait  # type: ignore[method-assign]

    def begin_step(self) -> None:
        """Begins a step, before its wait for data."""
        self._begin, self._inside = time.perf_counter(), True

    def has_data(self) -> None:
        """Ends the step's wait for data."""
        self._data_s += time.perf_counter() - self._begin

    def end_step(self) -> None:
        """Ends the step."""
        self._own_s += time.perf_counter() - self._begin
        self._inside = False
        self._steps += 1

    def slowest(self) -> dict[str, Any]:
        """Returns entries of metrics.jsonl since the last call. Every rank calls it once in a log interval.

        Returns:
            ``slowest_rank``: the rank with the longest own time, and its node; in seconds, as means over the steps, its
            own time, its wait for data, and the mean own time of all ranks. Nothing for a single rank.
        """
        steps, runtime = max(1, self._steps), self._runtime
        waited_s = sum(begin.elapsed_time(end) for begin, end in self._events) / 1000  # the step has synchronised
        own = [(self._own_s - waited_s) / steps, self._data_s / steps]
        self._restart()
        if runtime.world_size == 1:
            return {}
        found = torch.tensor(own, dtype=torch.float64, device=runtime.device)
        times = found.new_empty(runtime.world_size, 2)
        dist.all_gather(list(times.unbind()), found)
        rank = int(times[:, 0].argmax())
        step_time_s, data_wait_s = times[rank].tolist()
        node = runtime.nodes[rank] if rank < len(runtime.nodes) else ""
        entry = {"rank": rank, "node": node, "step_time_s": step_time_s, "data_wait_s": data_wait_s}
        return {"slowest_rank": {**entry, "mean_step_time_s": times[:, 0].mean().item()}}

    def _timed(self, wait: Any) -> Any:
        if self._runtime.device.type == "cuda":
            if torch.cuda.current_stream() != torch.cuda.default_stream():
                return wait()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            found = wait()
            end.record()
            self._events.append((begin, end))
            return found
        begin_s = time.perf_counter()
        try:
            return wait()
        finally:
            self._own_s -= time.perf_counter() - begin_s
