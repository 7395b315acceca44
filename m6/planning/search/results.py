"""The outcome of a search: layouts with their prices, and rejections with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from m6.config.pipeline import Schedule
from m6.errors import UserError
from m6.planning.cost.compute_time import StepTime
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryFootprint

# Among layouts with times closer than this the simplest is preferred: an uncalibrated model cannot tell them apart.
TIME_TOLERANCE = 0.01

RejectionKind = Literal["infeasible", "device memory", "host memory", "slower"]


@dataclass(frozen=True)
class PricedLayout:
    """A feasible layout within the memory, with its footprint and its time."""

    layout: ParallelLayout
    footprint: MemoryFootprint
    time: StepTime

    @property
    def complexity(self) -> int:
        """A count of the layout's techniques, to prefer simple layouts."""
        layout = self.layout
        parts = [layout.tp_size > 1, layout.pp_size > 1, layout.checkpointing, layout.offload_optimizer]
        parts += [layout.overlap_micro_batches > 1, bool(layout.shares)]
        return layout.zero_stage + 2 * sum(parts) + 2 * layout.offload_params + (layout.ep_size > 1)


@dataclass(frozen=True)
class Rejection:
    """The reason why a layout is not a plan.

    Attributes:
        shortfall_bytes: missing memory, if memory is the reason.
    """

    layout: ParallelLayout
    kind: RejectionKind
    reason: str
    shortfall_bytes: int = 0


@dataclass
class SearchResult:
    """The outcome of a search.

    Attributes:
        plans: the fastest layouts, by time.
        visited: number of candidates.
        counters: the number of candidates by reason of rejection, and of the priced ones.
        nearest: the feasible candidate with the fewest missing bytes.
        of_schedules: the fastest layout by schedule of its pipeline; None: without a pipeline.
    """

    plans: list[PricedLayout] = field(default_factory=list)
    visited: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    nearest: Rejection | None = None
    of_schedules: dict[Schedule | None, PricedLayout] = field(default_factory=dict)

    @property
    def best(self) -> PricedLayout:
        """The simplest of the fastest plans, within the tolerance of the time model.

        Raises:
            UserError: no layout fits.
        """
        if not self.plans:
            near = "" if self.nearest is None else f"; the nearest: {self.nearest.layout}: {self.nearest.reason}"
            raise UserError(f"no layout fits{near}")
        limit = self.plans[0].time.total * (1 + TIME_TOLERANCE)
        return min((plan for plan in self.plans if plan.time.total <= limit), key=lambda plan: plan.complexity)

    def add(self, plan: PricedLayout) -> None:
        """Adds a plan."""
        self.plans.append(plan)
        alike = self.of_schedules.setdefault(_schedule(plan), plan)
        if plan.time.total < alike.time.total:
            self.of_schedules[_schedule(plan)] = plan

    def fastest(self, pipeline: bool) -> PricedLayout | None:
        """The fastest layout with a pipeline, or without one; None if no such layout was found."""
        alike = (plan for schedule, plan in self.of_schedules.items() if (schedule is not None) == pipeline)
        return min(alike, key=_seconds, default=None)

    def refine(self, improve: Callable[[PricedLayout], PricedLayout]) -> None:
        """Replaces every plan by the result of ``improve``."""
        plans = {plan.layout: plan for plan in (*self.plans, *self.of_schedules.values())}
        improved = {layout: improve(plan) for layout, plan in plans.items()}
        self.plans = sorted((improved[plan.layout] for plan in self.plans), key=_seconds)
        # After the improvement another plan may be the fastest of its schedule.
        for schedule in self.of_schedules:
            self.of_schedules[schedule] = min(
                (plan for plan in improved.values() if _schedule(plan) == schedule), key=_seconds
            )

    def count(self, reason: str) -> None:
        """Adds a candidate to the counters."""
        self.counters[reason] = self.counters.get(reason, 0) + 1


def _schedule(plan: PricedLayout) -> Schedule | None:
    return plan.layout.schedule if plan.layout.pp_size > 1 else None


def _seconds(plan: PricedLayout) -> float:
    return plan.time.total
