"""The position of a running step in its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan.placement import PlacementPlan


@dataclass
class Statistics:
    """Counts deviations from the plan.

    Attributes:
        num_misses: uses of chunks that were not in the plan.
        num_evictions: chunks that were dropped early because there was not enough memory.
    """

    num_misses: int = 0
    num_evictions: int = 0


class PlanCursor:
    """Finds each use of a step in the plan.

    Args:
        plan: the plan that the step follows.
        statistics: counts the uses that are not found where they should be.
    """

    def __init__(self, plan: PlacementPlan, statistics: Statistics) -> None:
        self.plan, self._statistics, self._position = plan, statistics, 0

    def restart(self) -> None:
        """Starts a step."""
        self._position = 0

    def locate(self, number: int) -> int:
        """Returns the moment of the plan for this use of chunk ``number``.

        That is the chunk's first moment at or after the expected one, from which the search wraps around. A chunk that
        the plan does not use gets the expected moment.
        """
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
        """Returns the candidate whose next use after moment ``now`` is the latest, or that has no more use."""
        moments = self.plan.trace.moments
        next_use = {moments[time].chunk: time for time in range(len(moments) - 1, now - 1, -1)}
        return max(candidates, key=lambda number: next_use.get(number, len(moments)))
