"""Finds the fastest layout that runs and fits: rules, then memory, then a bound on the time.

Every point of the lattice is visited or cut away with a reason; nothing is sampled. The same numbers of a
brute-force search, in another order and without cutting, are a test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from m6.config.run import RunConfig
from m6.errors import UserError
from m6.model.sharing import PARTS, Sharing
from m6.planning.activations import BatchShape
from m6.planning.cluster import Cluster
from m6.planning.footprint import Footprint, MemoryModel
from m6.planning.layout import Layout, divisors
from m6.planning.profile import Profile
from m6.planning.rules import RULES, refusal
from m6.planning.step_time import StepTime, TimeModel

MEMORY_FRACTION = 0.9
_TP_SIZES = (1, 2, 4, 8)
_PLAIN = {"tp_size": 1, "pp_size": 1, "stream_experts": False}
# Within this share of the fastest a simpler layout is preferred: an uncalibrated model knows no better.
_BAND = 0.01


@dataclass(frozen=True)
class Plan:
    """A layout that runs and fits, with its price."""

    layout: Layout
    footprint: Footprint
    time: StepTime

    @property
    def complexity(self) -> int:
        """How many things the layout does that a plain one does not."""
        layout = self.layout
        parts = (layout.tp_size > 1, layout.pp_size > 1, layout.checkpointing, layout.offload_optimizer)
        return layout.zero_stage + 2 * sum(parts) + 2 * layout.offload_params + (layout.ep_size > 1)


@dataclass(frozen=True)
class Rejection:
    """Why a layout is not a plan: ``rule``, ``device memory``, ``host memory`` or ``slower``."""

    layout: Layout
    kind: str
    why: str
    shortfall: int = 0
    """bytes that are missing, where memory is the reason"""


@dataclass
class SearchResult:
    """Plans by time, and what happened to all other points."""

    plans: list[Plan] = field(default_factory=list)
    visited: int = 0
    tally: dict[str, int] = field(default_factory=dict)
    """how many points each reason rejected"""
    nearest: Rejection | None = None
    """the one that the engine would run and that lacks the fewest bytes"""

    @property
    def best(self) -> Plan:
        """The simplest of the plans that are as fast as the fastest, within the band that the model knows.

        Raises:
            UserError: no layout fits.
        """
        if not self.plans:
            near = "" if self.nearest is None else f"; the nearest: {self.nearest.layout}: {self.nearest.why}"
            raise UserError(f"no layout fits{near}")
        limit = self.plans[0].time.total * (1 + _BAND)
        return min((plan for plan in self.plans if plan.time.total <= limit), key=lambda plan: plan.complexity)


class Planner:
    """Plans one run on one cluster.

    Args:
        config: the run; its own layout is what the planner may change, the rest stays.
        cluster: whose devices are all used.
        profile: calibration.
        batch: shape of a micro-batch that the data makes, if it is known.
        sharing: what the layers share, to plan the Pseudo stage.
        memory_fraction: how much of each memory may be planned for; allocators need the rest.
        forced: values that layouts must have.
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
    ) -> None:
        self.config, self.cluster, self.profile = config, cluster, profile or Profile()
        self.memory_fraction, self.forced = memory_fraction, forced or {}
        on_cpu = cluster.smallest.links.host is None
        self.memory = MemoryModel(config, self.profile, batch, sharing, on_cpu)
        self.time = TimeModel(config, cluster, self.profile, self.memory)

    def changed(self, **changes: Any) -> Planner:
        """A planner of the same run with other arguments."""
        same = {
            "cluster": self.cluster,
            "profile": self.profile,
            "batch": self.memory.row,
            "sharing": self.memory.sharing,
            "memory_fraction": self.memory_fraction,
            "forced": self.forced,
        }
        return Planner(self.config, **{**same, **changes})

    def lattice(self) -> Iterator[Layout]:
        """Every layout of the cluster's devices whose sizes divide each other, also those that no engine runs.

        Forced values are taken as they are.
        """
        world, rows = self.cluster.num_devices, self.config.deepspeed.train_batch_size
        experts = 1 if self.config.m6.moe is None else self.config.model.moe_config().num_experts
        heads, layers = self.config.model.num_attention_heads, self.config.model.num_layers
        for tp_size, pp_size in itertools.product(
            self._axis("tp_size", (size for size in _TP_SIZES if world % size == heads % size == 0)),
            self._axis("pp_size", (size for size in divisors(layers) if world % size == 0)),
        ):
            if world % (tp_size * pp_size) and not self.forced:
                continue
            dp_size = max(1, world // (tp_size * pp_size))
            ep_sizes = self._axis("ep_size", divisors(math.gcd(dp_size, experts)))
            micro_batches = self._axis("micro_batch_size", divisors(rows // dp_size) if rows % dp_size == 0 else ())
            flags = [
                self._axis(name, (False, True)) for name in ("checkpointing", "offload_optimizer", "offload_params")
            ]
            stages = self._axis("zero_stage", range(4))
            for ep_size, stage, micro_batch, *switches in itertools.product(ep_sizes, stages, micro_batches, *flags):
                # Streaming is for experts that a rank holds a share of.
                for stream in self._axis("stream_experts", (False, True) if ep_size > 1 else (False,)):
                    yield Layout(world, ep_size, tp_size, pp_size, stage, micro_batch, *switches, stream)  # type: ignore[call-arg]

    def _axis(self, name: str, values: Iterable[Any]) -> list[Any]:
        return [self.forced[name]] if name in self.forced else list(values)

    def search(self, num_plans: int = 10) -> SearchResult:
        """The ``num_plans`` fastest layouts that the engine runs and that fit.

        Raises:
            UserError: a forced value that a rule forbids in every layout.
        """
        result = SearchResult()
        refused: dict[str, str] = {}
        for layout in self.lattice():
            result.visited += 1
            rule = refusal(self.config, layout)
            if rule is not None:
                _count(result, rule.name)
                refused[rule.name] = rule.reason
                continue
            footprint = self.memory(layout)
            lack = self.shortfall(layout, footprint)
            if lack is not None:
                _count(result, lack.kind)
                if result.nearest is None or lack.shortfall < result.nearest.shortfall:
                    result.nearest = lack
                continue
            if len(result.plans) >= num_plans:
                limit = max(result.plans[-1].time.total, result.plans[0].time.total * (1 + _BAND))
                if self.time.lower_bound(layout) > limit:
                    _count(result, "slower by the FLOPs alone")
                    continue
            _count(result, "priced")
            result.plans.append(Plan(layout, footprint, self.time(layout)))
            result.plans.sort(key=lambda plan: plan.time.total)
            limit = result.plans[0].time.total * (1 + _BAND)
            cut = max(num_plans, sum(plan.time.total <= limit for plan in result.plans))
            del result.plans[cut:]
        if not result.plans and result.nearest is None:
            rules = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            raise UserError(f"every layout of {self.cluster.name} is refused ({rules})")
        return result

    def judge(self, layout: Layout) -> Plan | Rejection:
        """One layout: its price, or why it cannot be."""
        rule = refusal(self.config, layout)
        if rule is not None:
            return Rejection(layout, "rule", f'refused by "{rule.name}": {rule.reason}')
        footprint = self.memory(layout)
        return self.shortfall(layout, footprint) or Plan(layout, footprint, self.time(layout))

    def shortfall(self, layout: Layout, footprint: Footprint) -> Rejection | None:
        """The memory that ``layout`` exceeds, if it does."""
        nodes = self.cluster.smallest
        per_node, host = nodes.devices_per_node, nodes.host.memory_bytes * self.memory_fraction
        device = nodes.device.memory_bytes * self.memory_fraction
        on_host = per_node * (footprint.host + footprint.host_process)
        if nodes.links.host is None:  # a CPU: both are the same memory
            on_host += per_node * footprint.peak
        elif footprint.peak > device:
            missing = int(footprint.peak - device)
            return Rejection(
                layout,
                "device memory",
                f"needs {giga(footprint.peak)} of {giga(device)} on {nodes.device.name}, {giga(missing)} too much",
                missing,
            )
        if on_host > host:
            missing = int(on_host - host)
            return Rejection(
                layout,
                "host memory",
                f"needs {giga(on_host)} of {giga(host)} in the host memory of a node, {giga(missing)} too much",
                missing,
            )
        return None

    def neighbours(self, plan: Plan) -> list[Rejection]:
        """The plan with one choice changed, and why that is not better: by dimension."""
        found = []
        for name, values in _alternatives(self, plan.layout):
            for value in values:
                changed = replace(plan.layout, **{name: value})
                judged = self.judge(changed)
                if isinstance(judged, Plan):
                    ratio = judged.time.total / plan.time.total - 1
                    word = f"{ratio:+.1%} step time" if abs(ratio) >= 5e-4 else "as fast, less simple"
                    judged = Rejection(changed, "slower", word)
                found.append(replace(judged, why=f"{name} {value}: {judged.why}"))
        return found


def pseudo_sharing(config: RunConfig) -> Sharing:
    """What the layers share in the Pseudo stage of the run, or would in that of M6-10T: everything."""
    settings, layers = config.m6.pseudo_to_real, config.model.num_layers
    return Sharing(layers, 1, PARTS) if settings is None else settings.sharing(layers)


def stages(planner: Planner) -> list[Planner]:
    """``planner``, after one of the Pseudo stage if the run has one."""
    if planner.config.m6.pseudo_to_real is None:
        return [planner]
    return [planner.changed(sharing=pseudo_sharing(planner.config)), planner]


def smallest_cluster(planner: Planner, limit: int = 1 << 16) -> Cluster | None:
    """The smallest cluster of the same nodes that holds the run at all, by doubling; None up to ``limit`` devices."""
    nodes = planner.cluster.nodes[0]
    if nodes.links.network is None:
        limit = nodes.devices_per_node
    num_nodes = 1
    while num_nodes * nodes.devices_per_node <= limit:
        cluster = planner.cluster.resized(num_nodes * nodes.devices_per_node)
        # What rules refuse need not be visited for every size.
        other = planner.changed(cluster=cluster, forced={**_PLAIN, **planner.forced})
        for layout in other.lattice():
            if refusal(other.config, layout) is None and other.shortfall(layout, other.memory(layout)) is None:
                return cluster
        num_nodes *= 2
    return None


def would_fit(
    planner: Planner,
    lifted: Collection[str],
    forced: dict[str, Any],
    wanted: Callable[[Layout], bool] = lambda layout: True,
) -> Plan | None:
    """The fastest layout with ``forced`` values that is ``wanted``, that fits, and that no rule but those called
    ``lifted`` forbids."""
    other = planner.changed(forced={**planner.forced, **forced})
    found: Plan | None = None
    for layout in filter(wanted, other.lattice()):
        if any(each.refuses(other.config, layout) for each in RULES if each.name not in lifted):
            continue
        footprint = other.memory(layout)
        if other.shortfall(layout, footprint) is None:
            plan = Plan(layout, footprint, other.time(layout))
            found = plan if found is None or plan.time.total < found.time.total else found
    return found


def giga(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


def _alternatives(planner: Planner, layout: Layout) -> Iterator[tuple[str, list[Any]]]:
    rows, experts = planner.config.deepspeed.train_batch_size, 1
    if planner.config.m6.moe is not None:
        experts = planner.config.model.moe_config().num_experts
    sizes = {"ep_size": math.gcd(layout.dp_size, experts), "micro_batch_size": rows // layout.dp_size}
    axes: dict[str, list[Any]] = {name: _adjacent(getattr(layout, name), number) for name, number in sizes.items()}
    axes |= {"zero_stage": list(range(4)), "tp_size": [1, 2], "pp_size": [1, 2]}
    axes |= {name: [False, True] for name in ("checkpointing", "offload_optimizer", "offload_params")}
    if layout.ep_size > 1:
        axes["stream_experts"] = [False, True]
    for name, values in axes.items():
        yield name, [value for value in values if value != getattr(layout, name)]


def _adjacent(size: int, number: int) -> list[int]:
    """The two divisors of ``number`` below ``size`` and the two above."""
    sizes = list(divisors(number))
    below, above = [s for s in sizes if s < size], [s for s in sizes if s > size]
    return below[-2:] + above[:2]


def _count(result: SearchResult, reason: str) -> None:
    result.tally[reason] = result.tally.get(reason, 0) + 1
