"""Finds the fastest layout that the code can run and that fits: feasibility, then memory, then a bound on the time.

Every candidate is priced or rejected with a reason; nothing is sampled. A test compares the result with a brute-force
search that visits the candidates in another order and skips none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from m6.config.run import RunConfig
from m6.errors import UserError
from m6.model.sharing import Sharing
from m6.planning.cost.batch_shape import BatchShape
from m6.planning.cost.layout import ParallelLayout, divisors
from m6.planning.cost.memory import MemoryFootprint, MemoryModel
from m6.planning.cost.step_time import StepTime, TimeModel
from m6.planning.machine.cluster import Cluster
from m6.planning.machine.profile import Profile
from m6.planning.search.configuration import check_priced
from m6.planning.search.feasibility import Feasibility

MEMORY_FRACTION = 0.9
"""The default share of a memory that a plan may use; allocators need the rest."""
_MIB = 2**20
_TP_SIZES = (1, 2, 4, 8)
# Among layouts whose times differ by less the simplest is preferred: an uncalibrated model cannot tell them apart.
_TIME_TOLERANCE = 0.01

RejectionKind = Literal["infeasible", "device memory", "host memory", "slower"]


@dataclass(frozen=True)
class PricedLayout:
    """A layout that the code can run and that fits, with its memory and its time."""

    layout: ParallelLayout
    footprint: MemoryFootprint
    time: StepTime

    @property
    def complexity(self) -> int:
        """A count of the techniques that the layout uses, to prefer simple ones."""
        layout = self.layout
        parts = (layout.tp_size > 1, layout.pp_size > 1, layout.checkpointing, layout.offload_optimizer)
        return layout.zero_stage + 2 * sum(parts) + 2 * layout.offload_params + (layout.ep_size > 1)


@dataclass(frozen=True)
class Rejection:
    """Why a layout is not a plan.

    Attributes:
        shortfall_bytes: missing memory, where memory is the reason.
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
        tally: how many candidates were rejected for each reason, or priced.
        nearest: the candidate that the code can run and that lacks the fewest bytes.
    """

    plans: list[PricedLayout] = field(default_factory=list)
    visited: int = 0
    tally: dict[str, int] = field(default_factory=dict)
    nearest: Rejection | None = None

    @property
    def best(self) -> PricedLayout:
        """The simplest of the plans that are as fast as the fastest, within the tolerance of the time model.

        Raises:
            UserError: no layout fits.
        """
        if not self.plans:
            near = "" if self.nearest is None else f"; the nearest: {self.nearest.layout}: {self.nearest.reason}"
            raise UserError(f"no layout fits{near}")
        limit = self.plans[0].time.total * (1 + _TIME_TOLERANCE)
        return min((plan for plan in self.plans if plan.time.total <= limit), key=lambda plan: plan.complexity)

    def count(self, reason: str) -> None:
        """Adds a candidate to the tally."""
        self.tally[reason] = self.tally.get(reason, 0) + 1


class Planner:
    """Plans one run on one cluster.

    Args:
        config: the run. The planner may change its layout and nothing else.
        cluster: all of its devices are used.
        profile: calibration; None: assumed efficiencies.
        batch: the shape of a micro-batch of the run's data; None: rows without padding.
        sharing: what the layers share, to plan the Pseudo stage.
        memory_fraction: the share of each memory that a plan may use.
        forced: values that layouts must have, by the names of ``ParallelLayout``.
        feasibility: of the same run, to share its answers; None: a new one.
    """

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        profile: Profile | None = None,
        batch: BatchShape | None = None,
        sharing: Sharing | None = None,
        memory_fraction: float = MEMORY_FRACTION,
        forced: dict[str, Any] | None = None,
        feasibility: Feasibility | None = None,
    ) -> None:
        check_priced(config)
        self.config, self.cluster, self.profile = config, cluster, profile or Profile()
        self.memory_fraction, self.forced = memory_fraction, forced or {}
        on_cpu = cluster.smallest.links.host is None
        self.memory = MemoryModel(config, self.profile, batch, sharing, on_cpu)
        self.time = TimeModel(config, cluster, self.profile, self.memory)
        self.feasibility = feasibility or Feasibility(config)

    def changed(self, **changes: Any) -> Planner:
        """A planner with some arguments changed."""
        arguments = {
            "config": self.config,
            "cluster": self.cluster,
            "profile": self.profile,
            "batch": self.memory.row,
            "sharing": self.memory.sharing,
            "memory_fraction": self.memory_fraction,
            "forced": self.forced,
            "feasibility": None if "config" in changes else self.feasibility,
        }
        return Planner(**{**arguments, **changes})

    def candidates(self) -> Iterator[ParallelLayout]:
        """Every layout of the cluster's devices whose sizes divide each other, feasible or not.

        Forced values need not divide anything.
        """
        world, rows = self.cluster.num_devices, self.config.deepspeed.train_batch_size
        experts = 1 if self.config.m6.moe is None else self.config.model.moe_config().num_experts
        heads, layers = self.config.model.num_attention_heads, self.config.model.num_layers
        for tp_size, pp_size in itertools.product(
            self._values("tp_size", (size for size in _TP_SIZES if world % size == heads % size == 0)),
            self._values("pp_size", (size for size in divisors(layers) if world % size == 0)),
        ):
            if world % (tp_size * pp_size) and not self.forced:
                continue
            dp_size = max(1, world // (tp_size * pp_size))
            ep_sizes = self._values("ep_size", divisors(math.gcd(dp_size, experts)))
            micro_batches = self._values("micro_batch_size", divisors(rows // dp_size) if rows % dp_size == 0 else ())
            switches = [
                self._values(name, (False, True)) for name in ("checkpointing", "offload_optimizer", "offload_params")
            ]
            zero_stages = self._values("zero_stage", range(4))
            for ep_size, zero_stage, micro_batch, *flags in itertools.product(
                ep_sizes, zero_stages, micro_batches, *switches
            ):
                # Streaming is considered where a rank holds a share of the experts.
                for stream in self._values("stream_experts", (False, True) if ep_size > 1 else (False,)):
                    layout = ParallelLayout(world, ep_size, tp_size, pp_size, zero_stage, micro_batch, *flags, stream)  # type: ignore[call-arg]
                    if "ranks_per_node" in self.forced:
                        yield replace(layout, ranks_per_node=self.forced["ranks_per_node"])
                    else:
                        # Exchanges differ in their time alone, so that the slower one need not be visited.
                        yield self.time.with_exchange(layout)

    def _values(self, name: str, values: Iterable[Any]) -> list[Any]:
        return [self.forced[name]] if name in self.forced else list(values)

    def search(self, num_plans: int = 10) -> SearchResult:
        """The ``num_plans`` fastest layouts that the code can run and that fit.

        Raises:
            UserError: the forced values leave no layout that the code can run.
        """
        result = SearchResult()
        refused: dict[str, str] = {}
        for layout in self.candidates():
            result.visited += 1
            # The cheapest check comes first, the price last.
            refusal = self.feasibility.refusal(layout)
            if refusal is not None:
                result.count(refusal.kind)
                refused.setdefault(refusal.kind, refusal.reason)
                continue
            footprint = self.memory(layout)
            rejection = self.memory_rejection(layout, footprint)
            if rejection is not None:
                result.count(rejection.kind)
                if result.nearest is None or rejection.shortfall_bytes < result.nearest.shortfall_bytes:
                    result.nearest = rejection
                continue
            if len(result.plans) >= num_plans:
                limit = max(result.plans[-1].time.total, result.plans[0].time.total * (1 + _TIME_TOLERANCE))
                # No plan of the result can be displaced by a layout whose bound is above the slowest of them.
                if self.time.lower_bound(layout) > limit:
                    result.count("slower by the FLOPs alone")
                    continue
            result.count("priced")
            result.plans.append(PricedLayout(layout, footprint, self.time(layout)))
            result.plans.sort(key=lambda plan: plan.time.total)
            # All plans within the tolerance are kept: the best of them is the simplest.
            limit = result.plans[0].time.total * (1 + _TIME_TOLERANCE)
            cut = max(num_plans, sum(plan.time.total <= limit for plan in result.plans))
            del result.plans[cut:]
        if not result.plans and result.nearest is None:
            rows, world = self.config.deepspeed.train_batch_size, self.cluster.num_devices
            if rows % world:  # every other reason follows from this one
                raise UserError(f"train_batch_size {rows} is not a multiple of {world} devices")
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in refused.items())
            raise UserError(f"every layout of {self.cluster.name} is refused ({reasons})")
        return result

    def evaluate(self, layout: ParallelLayout) -> PricedLayout | Rejection:
        """The price of one layout, or why it cannot be used."""
        refusal = self.feasibility.explain(layout)
        if refusal is not None:
            return Rejection(layout, "infeasible", f"refused: {refusal.reason}")
        footprint = self.memory(layout)
        return self.memory_rejection(layout, footprint) or PricedLayout(layout, footprint, self.time(layout))

    def memory_rejection(self, layout: ParallelLayout, footprint: MemoryFootprint) -> Rejection | None:
        """The memory that ``layout`` exceeds, or None."""
        for kind, needed, limit, place in self._memory_limits(layout, footprint):
            if needed > limit:
                missing = int(needed - limit)
                found = f"needs {format_gb(needed)} of {format_gb(limit)} {place}, {format_gb(missing)} too much"
                return Rejection(layout, kind, found, missing)
        return None

    def _memory_limits(
        self, layout: ParallelLayout, footprint: MemoryFootprint
    ) -> Iterator[tuple[RejectionKind, float, float, str]]:
        """Yields kinds of memory with the bytes that are needed, those that there are, and a name."""
        nodes, store = self.cluster.smallest, self.config.expert_store
        per_node, host = nodes.devices_per_node, nodes.host.memory_bytes * self.memory_fraction
        on_host = per_node * (footprint.host + footprint.host_process)
        if nodes.links.host is None:  # a CPU: device and host memory are the same
            on_host += per_node * footprint.peak
        else:
            device = nodes.device.memory_bytes * self.memory_fraction
            yield "device memory", footprint.peak, device, f"on {nodes.device.name}"
        yield "host memory", on_host, host, "in the host memory of a node"
        if not layout.stream_experts or store is None:
            return
        # Budgets are those of a rank, which has more experts where there are fewer ranks.
        if not isinstance(store.device_budget_mib, str):
            budget = store.device_budget_mib * _MIB
            yield "device memory", footprint.peak, budget, "in m6.offload.device_budget_mib"
        if not isinstance(store.host_budget_mib, str):
            budget = store.host_budget_mib * _MIB
            yield "host memory", self.memory.stored_experts(layout), budget, "in m6.offload.host_budget_mib"

    def neighbours(self, plan: PricedLayout) -> list[Rejection]:
        """The layouts that differ from ``plan`` in one choice, and why each of them is not better."""
        found = []
        for name, values in self._neighbour_values(plan.layout):
            for value in values:
                changed = replace(plan.layout, **{name: value})
                if name != "ranks_per_node":  # a choice of its own, which depends on the others
                    changed = self.time.with_exchange(replace(changed, ranks_per_node=0))
                judged = self.evaluate(changed)
                if isinstance(judged, PricedLayout):
                    ratio = judged.time.total / plan.time.total - 1
                    reason = f"{ratio:+.1%} step time" if abs(ratio) >= 5e-4 else "as fast, less simple"
                    judged = Rejection(changed, "slower", reason)
                found.append(replace(judged, reason=f"{name} {value}: {judged.reason}"))
        return found

    def _neighbour_values(self, layout: ParallelLayout) -> Iterator[tuple[str, list[Any]]]:
        """Other values of each choice: the next divisors of sizes, all other values of the rest."""
        rows, experts = self.config.deepspeed.train_batch_size, 1
        if self.config.m6.moe is not None:
            experts = self.config.model.moe_config().num_experts
        sizes = {"ep_size": math.gcd(layout.dp_size, experts), "micro_batch_size": rows // layout.dp_size}
        axes: dict[str, list[Any]] = {
            name: _adjacent_divisors(getattr(layout, name), number) for name, number in sizes.items()
        }
        axes |= {"zero_stage": list(range(4)), "tp_size": [1, 2], "pp_size": [1, 2]}
        axes |= {name: [False, True] for name in ("checkpointing", "offload_optimizer", "offload_params")}
        if layout.ep_size > 1:
            axes["stream_experts"] = [False, True]
        if layout.ep_size > self.time.nodes.devices_per_domain:
            axes["ranks_per_node"] = [0, self.time.nodes.devices_per_domain]
        for name, values in axes.items():
            yield name, [value for value in values if value != getattr(layout, name)]


def format_gb(num_bytes: float) -> str:
    """Gigabytes of 10^9 bytes."""
    return f"{num_bytes / 1e9:,.2f} GB"


def _adjacent_divisors(size: int, number: int) -> list[int]:
    """The two divisors of ``number`` below ``size`` and the two above."""
    sizes = list(divisors(number))
    below, above = [s for s in sizes if s < size], [s for s in sizes if s > size]
    return below[-2:] + above[:2]
