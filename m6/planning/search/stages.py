"""The phases (Pseudo, Real) of a run. Each has a layout of its own, apart from values common to both."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

from m6.architecture.sharing import PARTS, Sharing
from m6.config.run import RunConfig
from m6.errors import UserError
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, SearchResult

# These values change the numbers computed by a run, so they are equal in both phases: packing, dropout and capacities
# depend on the micro-batch, and experts in host memory have an optimizer of their own.
_COMMON = ("micro_batch_size", "stream_experts")


def pseudo_sharing(config: RunConfig) -> Sharing:
    """The sharing of layers in the run's Pseudo phase. For a run without one: everything is shared, as in M6-10T."""
    return config.planned_sharing or Sharing(config.model.num_layers, 1, PARTS)


def training_stages(planner: Planner) -> list[Planner]:
    """The planner of the Pseudo phase, if the run has one, and ``planner`` for the Real phase."""
    if planner.config.m6.pseudo_to_real is None:
        return [planner]
    return [planner.changed(sharing=pseudo_sharing(planner.config)), planner]


def stage_steps(planner: Planner) -> int:
    """The steps of the planner's phase. A Pseudo phase counts up to ``switch_step``, even if it may end earlier."""
    pseudo = planner.config.m6.pseudo_to_real
    switch_step = 0 if pseudo is None else pseudo.switch_step
    return switch_step if planner.memory.sharing is not None else planner.config.m6.training.total_steps - switch_step


def stage_samples(planner: Planner) -> int:
    """The samples of these steps. Steps of ``m6.training.batch_ramp`` have fewer."""
    config, steps = planner.config, stage_steps(planner)
    first = 0 if planner.memory.sharing is not None else config.m6.training.total_steps - steps
    return config.batch_sizes.before(first + steps) - config.batch_sizes.before(first)


def search_stages(stages: list[Planner], num_plans: int = 10) -> list[SearchResult]:
    """The ``num_plans`` fastest layouts of each phase.

    Layouts of both phases have the same values of ``_COMMON``. The values with the shortest whole run are chosen.

    Args:
        stages: of ``training_stages``.

    Returns:
        a result for each phase; without plans if no layout fits that phase.

    Raises:
        UserError: no layout can run, or the fitting layouts of the phases have no values in common.
    """
    alone = [stage.search(num_plans) for stage in stages]
    if not all(result.plans for result in alone) or len({_common(result.best) for result in alone}) == 1:
        return alone
    whole = [stage.search(sys.maxsize) for stage in stages]
    choices = set.intersection(*({_common(plan) for plan in result.plans} for result in whole))
    together = [[_restricted(result, choice) for result in whole] for choice in choices]
    if not together:
        layouts = " and ".join(str(result.best.layout) for result in alone)
        raise UserError(
            f"no layouts of both stages have the same {' and '.join(_COMMON)}; the best by themselves: {layouts}"
        )
    best = min(together, key=lambda results: _run_s(stages, results))
    return [replace(result, plans=result.plans[:num_plans]) for result in best]


@dataclass(frozen=True)
class RunPlan:
    """The layouts of a run on the fastest part of a cluster.

    Attributes:
        stages: planners of the phases, on this part.
        results: of each phase; without plans if no layout fits the phase.
        whole: a clause on each phase on all devices, if the part is not the whole cluster; else "".
    """

    stages: list[Planner]
    results: list[SearchResult]
    whole: list[str]


def plan_run(planner: Planner, num_plans: int = 10) -> RunPlan:
    """Searches all devices of the planner's cluster and its parts: more devices can make a step slower.

    Raises:
        UserError: see ``search_stages``. It is raised for all devices, even if a part of them could train the run.
    """
    stages = training_stages(planner)
    results = search_stages(stages, num_plans)
    whole = [_step_of(result) for result in results]
    best, least_s = RunPlan(stages, results, [""] * len(stages)), math.inf
    if all(result.plans for result in results):
        least_s = _run_s(stages, results)
    for part in planner.cluster.parts():
        on_part = training_stages(planner.changed(cluster=part))
        if not _may_be_faster(on_part, least_s):
            continue
        found = search_stages(on_part, num_plans)
        if all(result.plans for result in found) and _run_s(on_part, found) < least_s:
            best, least_s = RunPlan(on_part, found, whole), _run_s(on_part, found)
    return best


def _may_be_faster(stages: list[Planner], least_s: float) -> bool:
    """Whether the fastest layouts of the phases, each by itself, train the run in less than ``least_s`` seconds."""
    seconds = 0.0
    for stage in stages:
        steps = stage_steps(stage)
        try:
            plans = stage.search(1, least_s / steps if steps else math.inf).plans
        except UserError:  # no layout can run
            return False
        seconds += steps * plans[0].time.total if plans else math.inf
    return seconds < least_s


def _step_of(result: SearchResult) -> str:
    if not result.plans:
        return "no layout fits" if result.nearest is None else f"{result.nearest.layout}: {result.nearest.reason}"
    return f"a step takes {result.best.time.total:.4g} s ({result.best.layout})"


def _common(plan: PricedLayout) -> tuple[Any, ...]:
    return tuple(getattr(plan.layout, name) for name in _COMMON)


def _restricted(result: SearchResult, choice: tuple[Any, ...]) -> SearchResult:
    return replace(result, plans=[plan for plan in result.plans if _common(plan) == choice])


def _run_s(stages: list[Planner], results: list[SearchResult]) -> float:
    return sum(stage_steps(stage) * result.best.time.total for stage, result in zip(stages, results, strict=True))
