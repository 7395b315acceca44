"""Finds the fastest layout: checks of feasibility first, then memory, then a bound on the time.

Every candidate is priced or rejected with a reason; nothing is sampled. A test compares the result with a brute-force
search in another order without skips. Several searches give the Pareto-optimal plans, and the best plan for each number
of devices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from m6.architecture.communication_volume import PLACEMENTS, PlacementName
from m6.architecture.sharing import Sharing
from m6.config.pipeline import ONE_STAGE, Schedule
from m6.config.run import RunConfig
from m6.config.tensor import TensorSettings
from m6.errors import UserError
from m6.formatting import format_gb
from m6.planning.cost.layout import ParallelLayout, divisors
from m6.planning.cost.memory import MemoryFootprint, copied_bytes
from m6.planning.cost.stage_cuts import Fits, Suits
from m6.planning.cost.step_time import MEMORY_FRACTION, cost_models
from m6.planning.machine.cluster import Cluster
from m6.planning.machine.profile import Profile
from m6.planning.search.feasibility import Feasibility
from m6.planning.search.results import TIME_TOLERANCE, PricedLayout, Rejection, RejectionKind, SearchResult
from m6.training.sizes import BatchShape

_MIB = 2**20
SEARCHED: tuple[Schedule, ...] = ("1f1b", "interleaved_1f1b", "zbv")
"""The schedules of a search. The others never win: "interleaved_zero_bubble" and "dualpipev" wait as long as "zbv" or
longer, and keep as many activations or more. They are priced only if they are forced."""


class Planner:
    """Plans one run on one cluster.

    Args:
        config: the run. The planner may change its layout and nothing else.
        cluster: all of its devices are used.
        profile: calibration; None: assumed efficiencies.
        batch: the shape of a micro-batch of the run's data; None: rows without padding.
        sharing: what the layers share, to plan the Pseudo phase.
        memory_fraction: the usable share of each memory.
        forced: required values of layouts, by the names of ``ParallelLayout``.
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
        self.config, self.cluster, self.profile = config, cluster, profile or Profile()
        self.memory_fraction, self.forced = memory_fraction, forced or {}
        self.memory, self.time = cost_models(config, cluster, self.profile, batch, sharing, memory_fraction)
        self.feasibility = feasibility or Feasibility(config)
        self._copied: dict[ParallelLayout, float] = {}

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
        """Every layout of the cluster's devices with sizes that divide each other, feasible or not.

        Forced values need not divide anything. Of pipelines with tensor groups only the sizes of the run's own JSON are
        visited: few runs need both, and they would be most of a search.
        """
        world, rows = self.cluster.num_devices, self.config.deepspeed.train_batch_size
        experts = 1 if self.config.m6.moe is None else self.config.model.moe_config().num_experts
        layers, own = self.config.model.num_layers, (self.config.tensor_size, self.config.pipeline_size)
        schedules = SEARCHED if self.config.m6.gradient_delay is None else (ONE_STAGE,)  # others are refused
        for (tp_size, placement), pp_size in itertools.product(
            self._tensor_groups(), self._values("pp_size", (size for size in divisors(world) if size <= layers))
        ):
            if world % pp_size or (world % (tp_size * pp_size) and not self.forced):
                continue
            if tp_size > 1 and pp_size > 1 and "pp_size" not in self.forced and (tp_size, pp_size) != own:
                continue
            dp_size = max(1, world // (tp_size * pp_size))
            axes: dict[str, list[Any]] = {
                "ep_size": self._values("ep_size", divisors(math.gcd(dp_size * tp_size, experts))),
                "zero_stage": self._values("zero_stage", range(4)),
                "micro_batch_size": self._values("micro_batch_size", _micro_batch_sizes(rows, dp_size)),
                "schedule": self._values("schedule", schedules if pp_size > 1 else SEARCHED[:1]),
            }
            for name in ("checkpointing", "offload_optimizer", "offload_params"):
                axes[name] = self._values(name, (False, True))
            for values in itertools.product(*axes.values()):
                chosen = dict(zip(axes, values, strict=True))
                # Streaming is considered if a rank holds only a share of the experts.
                streams = (False, True) if chosen["ep_size"] > 1 else (False,)
                may_interleave = chosen["ep_size"] > 1 and tp_size == pp_size == 1
                at_once = self._values("overlap_micro_batches", (1, 2) if may_interleave else (1,))
                for stream, count in itertools.product(self._values("stream_experts", streams), at_once):
                    sizes = {"tp_size": tp_size, "placement": placement, "pp_size": pp_size}
                    sizes["sequence_parallel"] = self._divides_tokens()
                    layout = ParallelLayout(
                        world, stream_experts=stream, overlap_micro_batches=count, **sizes, **chosen
                    )
                    if pp_size > 1 and "cut" in self.forced:
                        layout = replace(layout, cut=self.forced["cut"])
                    if "ranks_per_node" in self.forced:
                        layout = replace(layout, ranks_per_node=self.forced["ranks_per_node"])
                    else:
                        # Exchanges differ in their time alone, so only the faster one is visited.
                        layout = self.time.exchange.faster(layout)
                    if "shares" in self.forced:
                        yield replace(layout, shares=self.forced["shares"])
                        continue
                    yield layout
                    if self.cluster.is_mixed and pp_size == 1:
                        balanced = self.time.balanced(layout)
                        if balanced.shares:
                            yield balanced

    def _tensor_groups(self) -> Iterator[tuple[int, PlacementName]]:
        """Sizes and placements of tensor groups for the matrices of the model. Forced ones need not divide these."""
        model = self.config.model
        # With experts ``ep_size`` divides most of the model, so a search through sizes of tensor groups gains little.
        sizes = divisors(self.cluster.num_devices) if self.config.m6.moe is None else (1,)
        if self.config.m6.moe is not None and self.config.tensor is not None:
            sizes = (self.config.tensor_size,)
        for size, placement in itertools.product(self._values("tp_size", sizes), self._values("placement", PLACEMENTS)):
            if size == 1:
                fits = placement == PLACEMENTS[0] or "placement" in self.forced
            else:
                fits = TensorSettings(num_ranks=size, placement=placement).refusal(model) is None
            if fits or ("tp_size" in self.forced and placement == PLACEMENTS[0]):
                yield size, placement

    def _divides_tokens(self) -> bool:
        own = self.config.tensor is not None and self.config.tensor.sequence_parallel
        return bool(self.forced.get("sequence_parallel", own))

    def _values(self, name: str, values: Iterable[Any]) -> list[Any]:
        return [self.forced[name]] if name in self.forced else list(values)

    def search(self, num_plans: int = 10, limit_s: float = math.inf) -> SearchResult:
        """The ``num_plans`` fastest feasible layouts within the memory.

        Args:
            limit_s: layouts with a lower bound of the step time above it are left out.

        Raises:
            UserError: the forced values leave no feasible layout.
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
            if limit_s < math.inf and self.time.lower_bound(layout) > limit_s:
                result.count("slower than the limit")
                continue
            if layout.pp_size > 1 and self._too_slow(layout, result, num_plans):  # before the search for its best cut
                result.count("slower by equal shares of its passes alone")
                continue
            layout = self.with_cut(layout)
            rejection = self.memory_rejection(layout)
            if rejection is not None:
                result.count(rejection.kind)
                if result.nearest is None or rejection.shortfall_bytes < result.nearest.shortfall_bytes:
                    result.nearest = rejection
                continue
            if self._too_slow(layout, result, num_plans):
                result.count("slower by the FLOPs alone")
                continue
            result.count("priced")
            result.add(self._priced(layout))
            result.plans.sort(key=lambda plan: plan.time.total)
            # All plans within the tolerance are kept: the best of them is the simplest.
            limit = result.plans[0].time.total * (1 + TIME_TOLERANCE)
            cut = max(num_plans, sum(plan.time.total <= limit for plan in result.plans))
            del result.plans[cut:]
        result.refine(self.refined)
        if not result.plans and result.nearest is None:
            rows, world = self.config.deepspeed.train_batch_size, self.cluster.num_devices
            if rows < world:  # every other reason follows from this one
                raise UserError(f"train_batch_size {rows} has fewer samples than there are devices, {world}")
            if not result.visited:
                values = ", ".join(f"{name}={value}" for name, value in self.forced.items())
                raise UserError(f"no layout has the forced {values}: pp_size must divide the {world} devices")
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in refused.items())
            raise UserError(f"every layout of {self.cluster.name} is refused ({reasons})")
        return result

    def evaluate(self, layout: ParallelLayout) -> PricedLayout | Rejection:
        """The price of one layout, or the reason against it."""
        refusal = self.feasibility.explain(layout)
        if refusal is not None:
            return Rejection(layout, "infeasible", f"refused: {refusal.reason}")
        layout = self.with_cut(layout)
        return self.memory_rejection(layout) or self.refined(self._priced(layout))

    def _priced(self, layout: ParallelLayout) -> PricedLayout:
        return PricedLayout(layout, self.memory(layout), self.time(layout))

    def _too_slow(self, layout: ParallelLayout, result: SearchResult, num_plans: int) -> bool:
        """Whether the layout's bound is above the slowest plan and above the fastest of its kind, with or without a
        pipeline. Then it can displace none of them."""
        alike = result.fastest(pipeline=layout.pp_size > 1)
        if len(result.plans) < num_plans or alike is None:
            return False
        slowest = max(result.plans[-1].time.total, result.plans[0].time.total * (1 + TIME_TOLERANCE))
        return self.time.lower_bound(layout) > max(slowest, alike.time.total)

    def with_cut(self, layout: ParallelLayout) -> ParallelLayout:
        """The layout with the best cut of its pipeline: the fastest slowest rank within the memory. If no cut fits, its
        stages are about equal."""
        if layout.pp_size == 1 or layout.cut:
            return layout
        find = self.time.pipeline.with_cut
        found = None if self._is_hopeless(layout) else find(layout, self._fits(layout), self._suits(layout))
        return found or self.feasibility.with_whole_groups(layout)

    def _is_hopeless(self, layout: ParallelLayout) -> bool:
        """Whether weights, gradients and optimizer states exceed the memory of all devices together. No cut changes
        their sum."""
        if self.cluster.smallest.links.host is None:
            return False
        places = (self.time.pipeline.nodes_of(layout, place) for place in range(layout.pp_size))
        smallest = (min(nodes.device.memory_bytes for nodes in types) for types in places)
        footprints = self.memory.footprints(layout)
        # Old weights do depend on the cut: the last rank needs none, so more layers on it need fewer.
        needed = sum(footprint.resident - footprint.old_weights - footprint.owned_experts for footprint in footprints)
        return needed > sum(smallest) * self.memory_fraction

    def refined(self, plan: PricedLayout) -> PricedLayout:
        """The plan of a pipeline with a cut improved for the time of the whole step. Other plans stay as they are."""
        layout = plan.layout
        if not layout.cut or "cut" in self.forced:
            return plan
        refine, limits = self.time.pipeline.refined, (self._fits(layout), self._suits(layout))
        return self._priced(refine(layout, lambda other: self.time(other).total, *limits))

    def _fits(self, layout: ParallelLayout) -> Fits:
        fitting: dict[tuple[Any, ...], bool] = {}
        contents = functools.cache(self._contents)

        def fits(place: int, stages: Sequence[range]) -> bool:
            key = (place, *map(contents, stages))
            if key not in fitting:
                fitting[key] = self._shortfall(layout, place, self.memory.footprint(layout, place, stages)) is None
            return fitting[key]

        return fits

    def _suits(self, layout: ParallelLayout) -> Suits:
        """With streamed experts every rank has to have some."""
        sparse = self.memory.model.is_sparse
        return lambda place, stages: not layout.stream_experts or any(map(sparse.__getitem__, itertools.chain(*stages)))

    def _contents(self, stage: range) -> tuple[int | bool, ...]:
        """The cache key of a stage's memory."""
        is_sparse, sharing = self.memory.model.is_sparse, self.memory.sharing
        stored = stage if sharing is None else sorted(set(map(sharing.first_layer, stage)))
        sparse = (sum(map(is_sparse.__getitem__, layers)) for layers in (stage, stored))
        return len(stage), len(stored), *sparse, stage.start == 0, stage.stop == len(is_sparse)

    def fullest_devices(self, layout: ParallelLayout) -> list[tuple[str, int, float]]:
        """(name, bytes of its fullest rank, usable bytes of a rank) of each type of devices."""
        peaks: dict[tuple[str, int], int] = {}
        for place, footprint in enumerate(self.memory.footprints(layout)):
            for nodes in self.time.pipeline.nodes_of(layout, place):
                device = nodes.device.name, nodes.device.memory_bytes
                peaks[device] = max(footprint.peak, peaks.get(device, 0))
        return [(name, peak, memory * self.memory_fraction) for (name, memory), peak in peaks.items()]

    def host_bytes(self, layout: ParallelLayout) -> int:
        """Bytes of states in the host memory of a node. All its ranks count as the rank with most of them; that is not
        always the rank with the fullest device."""
        return self.cluster.smallest.devices_per_node * max(each.host for each in self.memory.footprints(layout))

    def memory_rejection(self, layout: ParallelLayout) -> Rejection | None:
        """The rejection if ``layout`` exceeds a memory, or None. In a pipeline the rank with the largest shortfall
        counts."""
        found = (self._shortfall(layout, *each) for each in enumerate(self.memory.footprints(layout)))
        return max((each for each in found if each is not None), key=lambda each: each.shortfall_bytes, default=None)

    def _shortfall(self, layout: ParallelLayout, place: int, footprint: MemoryFootprint) -> Rejection | None:
        """The rejection if a rank at this place in the pipeline exceeds a memory, or None."""
        for kind, needed, limit, where in self._memory_limits(layout, place, footprint):
            if needed > limit:
                missing = int(needed - limit)
                found = f"needs {format_gb(needed)} of {format_gb(limit)} {where}, {format_gb(missing)} too much"
                return Rejection(layout, kind, found, missing)
        return None

    def _memory_limits(
        self, layout: ParallelLayout, place: int, footprint: MemoryFootprint
    ) -> Iterator[tuple[RejectionKind, float, float, str]]:
        """Yields (kind of memory, needed bytes, usable bytes, name)."""
        nodes = min(self.time.pipeline.nodes_of(layout, place), key=lambda nodes: nodes.device.memory_bytes)
        per_node, host = nodes.devices_per_node, nodes.host.memory_bytes * self.memory_fraction
        if layout not in self._copied:  # a search for a cut asks for the same layout thousands of times
            self._copied[layout] = copied_bytes(self.memory, layout)
        copied = per_node * self._copied[layout]
        on_host = per_node * (footprint.host + footprint.host_process) + copied
        if nodes.links.host is None:  # a CPU: device and host memory are the same
            on_host += per_node * footprint.peak
        else:
            device = nodes.device.memory_bytes * self.memory_fraction
            yield "device memory", footprint.peak, device, f"on {nodes.device.name}"
        where = "in the host memory of a node"
        if on_host > host >= on_host - copied and self.config.m6.checkpoint.async_save:
            where += f" (of it {format_gb(copied)} the copy of a checkpoint, see m6.checkpoint.async_save)"
        yield "host memory", on_host, host, where
        store = self.config.expert_store
        if not layout.stream_experts or store is None:
            return
        # Budgets are per rank. With fewer ranks each has more experts.
        if not isinstance(store.device_budget_mib, str):
            budget = store.device_budget_mib * _MIB
            yield "device memory", footprint.peak, budget, "in m6.offload.device_budget_mib"
        if not isinstance(store.host_budget_mib, str):
            budget = store.host_budget_mib * _MIB
            yield "host memory", footprint.store, budget, "in m6.offload.host_budget_mib"


def _micro_batch_sizes(rows: int, ranks: int) -> list[int]:
    """The possible sizes of micro-batches. Every rank has the same number of them; if the ranks do not divide the
    batch, every rank has at least one."""
    equal = rows % ranks == 0
    return [size for size in divisors(rows // ranks if equal else rows) if size * ranks <= rows]


Item = TypeVar("Item")
_ALL_PLANS = 1 << 30


def pareto(items: Iterable[Item], costs: Callable[[Item], Sequence[float]]) -> list[Item]:
    """The Pareto-optimal items, sorted by the first cost. Of items with equal costs the first is kept.

    The frontier of TensorOpt (arXiv 2004.10856), over whole plans because this engine has no choices per layer.
    """
    kept: list[tuple[Sequence[float], Item]] = []
    for cost, item in sorted(((costs(item), item) for item in items), key=lambda pair: tuple(pair[0])):
        # Items are sorted, so only earlier ones can beat this one.
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in kept):
            kept.append((cost, item))
    return [item for _, item in kept]


def plan_costs(plan: PricedLayout) -> tuple[float, float, float, float]:
    """Step time, device memory, host memory, devices."""
    return (plan.time.total, plan.footprint.peak, plan.footprint.host, plan.layout.world_size)


def frontier(planner_of: Callable[[Cluster], Planner], cluster: Cluster, counts: Sequence[int]) -> list[PricedLayout]:
    """The Pareto-optimal layouts over the numbers of devices in ``counts``.

    Args:
        planner_of: makes the planner of a part of ``cluster``.

    Raises:
        UserError: no layout fits on any of them.
    """
    plans: list[PricedLayout] = []
    for count in counts:
        plans = pareto([*plans, *_plans(planner_of(cluster.first(count)))], plan_costs)
    if not plans:
        raise UserError(f"no layout fits on {', '.join(map(str, counts))} devices of {cluster.name}")
    return plans


def curve(
    planner_of: Callable[[Cluster], Planner], cluster: Cluster, counts: Sequence[int]
) -> list[tuple[int, PricedLayout | None, str]]:
    """(devices, best plan, reason if there is none) by number of devices: Rubick's sensitivity curve (2408.08586).

    Args:
        planner_of: makes the planner of a part of ``cluster``.
    """
    rows: list[tuple[int, PricedLayout | None, str]] = []
    for count in counts:
        try:
            rows.append((count, planner_of(cluster.first(count)).search().best, ""))
        except UserError as error:
            rows.append((count, None, str(error)))
    return rows


def device_counts(cluster: Cluster) -> list[int]:
    """1, 2, 4, ... devices of a node, then 1, 2, 4, ... nodes, and the whole cluster."""
    per_node, counts, size = cluster.nodes[0].devices_per_node, [], 1
    while size < per_node:
        if per_node % size == 0:
            counts.append(size)
        size *= 2
    size = per_node
    while size < cluster.num_devices:
        counts.append(size)
        size *= 2
    counts.append(cluster.num_devices)
    result = []
    for count in counts:
        try:
            cluster.first(count)
        except UserError:
            continue
        result.append(count)
    return result


def _plans(planner: Planner) -> list[PricedLayout]:
    try:
        return planner.search(_ALL_PLANS).plans
    except UserError:
        return []
