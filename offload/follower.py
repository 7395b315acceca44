"""Where a step is in the plan that it follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan import Plan


@dataclass
class Statistics:
    """
    Attributes:
        num_misses: uses that the plan did not foresee, since the construction.
        num_evictions: chunks that had to leave though the plan kept or fetched them.
    """

    num_misses: int = 0
    num_evictions: int = 0


class PlanFollower:
    """Finds each use of a step in the plan."""

    def __init__(self, plan: Plan, statistics: Statistics) -> None:
        self.plan, self._statistics, self._position = plan, statistics, 0

    def restart(self) -> None:
        """A step begins."""
        self._position = 0

    def locate(self, number: int) -> int:
        """Where in the plan's step this use of chunk ``number`` is, at or behind where it should be, or that place."""
        moments = self.plan.trace.moments
        for offset in range(len(moments)):
            position = (self._position + offset) % len(moments)
            if moments[position].chunk == number:
                self._statistics.num_misses += offset > 0
                self._position = position + 1
                return position
        self._statistics.num_misses += 1
        return self._position % len(moments)

    def used_last(self, candidates: Sequence[int], now: int) -> int:
        """That of the chunks whose next use is the farthest, or which is not used any more."""
        moments = self.plan.trace.moments
        next_use = {moments[time].chunk: time for time in range(len(moments) - 1, now - 1, -1)}
        return max(candidates, key=lambda number: next_use.get(number, len(moments)))
