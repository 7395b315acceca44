"""The layout of an elastic run on the present nodes of its job.

Rubick (arXiv 2408.08586) plans a job again whenever its resources change, with a performance model fitted to the job's
own measurements. Here the model is the planner's, and the factors of the parts of a step are fitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from m6.config.elastic import CHANGEABLE, FIXED_SUMS, ElasticSettings
from m6.config.run import RunConfig
from m6.errors import UserError
from m6.planning.cost.layout import DIMENSIONS, ParallelLayout, choices_of, divisors
from m6.planning.machine.calibration import fit_factors
from m6.planning.machine.cluster import Cluster, detect_cluster, load_cluster
from m6.planning.machine.profile import Profile
from m6.planning.search.configuration import configure
from m6.planning.search.feasibility import Feasibility
from m6.planning.search.planner import Planner
from m6.runs.layouts import LayoutRecord

_SETTINGS = (
    ("train_micro_batch_size_per_gpu",),
    ("zero_optimization",),
    ("m6", "training", "ep_size"),
    ("m6", "training", "activation_checkpointing"),
    ("m6", "training", "overlap_micro_batches"),
    ("m6", "moe", "ranks_per_node"),
    ("m6", "parallel", "pipeline"),
    ("m6", "parallel", "shares"),
)
"""The keys of a run's JSON set by a layout of a run with ``m6.elastic``."""


@dataclass(frozen=True)
class Decision:
    """A layout, and the reason for it.

    Attributes:
        nodes: number of its nodes.
        predicted_s: seconds of a step: measured if the run has had this layout, else predicted.
        parts: predicted seconds by part, without fitted factors.
        grow_at: the smallest number of nodes above the job's own with a faster layout worth a change; 0 if there is
            none.
    """

    nodes: int
    layout: ParallelLayout
    predicted_s: float
    parts: dict[str, float]
    reason: str
    grow_at: int = 0

    def record(self, time: float, step: int, available: int) -> LayoutRecord:
        """Its entry in RUN/slurm/layouts.jsonl."""
        return LayoutRecord(
            time=time,
            step=step,
            available=available,
            nodes=self.nodes,
            layout={**asdict(self.layout), "cut": list(self.layout.cut), "shares": list(self.layout.shares)},
            description=str(self.layout),
            reason=self.reason,
            predicted_s=self.predicted_s,
            parts=self.parts,
        )


def replan(
    config: RunConfig,
    node: Cluster,
    available: int,
    history: Sequence[LayoutRecord] = (),
    measured: Sequence[float | None] = (),
    profile: Profile | None = None,
) -> Decision:
    """Chooses the fastest layout for at most ``available`` nodes. It may leave nodes idle.

    Args:
        config: a run with ``m6.elastic``.
        node: a cluster of one type of nodes; their number does not matter.
        available: nodes of the job.
        history: the run's layouts so far.
        measured: seconds of a step of each, None if there are none.
        profile: of the machine.

    Raises:
        UserError: there are fewer nodes than ``min_nodes``, or no layout fits; the message gives the reason for each
            number of nodes.
    """
    settings = _settings(config)
    if available < settings.min_nodes:
        raise UserError(f"m6.elastic.min_nodes is {settings.min_nodes}, but the job has {available} nodes")
    everything, refusals = _layouts(config, node, _learned(profile or Profile(), history, measured))
    found = [each for each in everything if each.nodes <= available]
    if not found:
        raise UserError(
            f"m6.elastic: no layout of {settings.min_nodes} to {min(available, settings.max_nodes)} nodes fits: "
            + "; ".join(f"{nodes}: {reason}" for nodes, reason in refusals.items() if nodes <= available)
        )
    known = {ParallelLayout(**r.layout): s for r, s in zip(history, measured, strict=True) if s is not None}
    failed = {ParallelLayout(**record.layout) for record in history if record.failed} - known.keys()
    tried = [each for each in found if each.layout not in failed] or found
    timed = [(known.get(each.layout, each.predicted_s), each) for each in tried]
    best_s, best = min(timed, key=lambda pair: (pair[0], pair[1].nodes))
    chosen_s, chosen, reason = best_s, best, "the fastest that fits"
    if history:
        before = ParallelLayout(**history[-1].layout)
        before_s, stays = next(((s, each) for s, each in timed if each.layout == before), (0.0, None))
        if before in failed:
            reason = f"the fastest that fits and has not failed, as {before} did"
        elif stays is None:
            reason = f"the fastest that fits; {before} does not fit these nodes"
        elif best_s <= before_s * (1 - settings.min_gain):
            reason = f"saves {1 - best_s / before_s:.0%} of a step against {before}"
        else:
            chosen_s, chosen, reason = before_s, stays, "as before"
            if best.layout != before:
                reason += f"; {best.layout} would save only {1 - best_s / before_s:.1%} of a step"
    worth = chosen_s * (1 - settings.min_gain)
    more = [each for each in everything if each.nodes > available and each.layout not in failed]
    faster = [each.nodes for each in more if known.get(each.layout, each.predicted_s) < worth]
    return Decision(chosen.nodes, chosen.layout, chosen_s, chosen.parts, reason, min(faster, default=0))


def is_planned_work(config: RunConfig) -> Callable[[dict[str, Any]], bool]:
    """Returns a test for entries of metrics.jsonl: whether their steps have the work planned by ``replan``.

    Such a step belongs to the last phase and has the whole batch.
    """
    ramp = sum(stage.steps for stage in config.batch_sizes.ramp)
    # An entry stands for the steps of the interval before it.
    first = ramp + config.m6.logging.interval_steps if ramp else 0

    def counts(entry: dict[str, Any]) -> bool:
        stage = entry.get("stage", {"name": "real"})["name"]
        return bool(entry["step"] >= first and (config.m6.pseudo_to_real is None or stage == "real"))

    return counts


def settings_of(config: RunConfig, layout: ParallelLayout) -> list[str]:
    """The ``key.path=value`` overrides of a run's JSON for this layout."""
    document = configure(config, layout)
    found = []
    for path in _SETTINGS:
        value: Any = document
        for key in path:
            value = None if value is None else value.get(key)
        # A section of the run's JSON has to be overridden even if the layout has no such section.
        taken_away = (path[1:2] == ("moe",) and config.m6.moe is not None) or (
            path[1:2] == ("parallel",) and getattr(config.m6.parallel, path[-1]) is not None
        )
        if value is not None or taken_away:
            found.append(f"{'.'.join(path)}={json.dumps(value)}")
    return found


def possible_nodes(config: RunConfig, ranks_per_node: int) -> list[int]:
    """The feasible numbers of nodes within the bounds. Memory is not checked."""
    settings, feasibility = _settings(config), Feasibility(config)
    fixed = _fixed(config)

    def runs(nodes: int) -> bool:
        world = nodes * ranks_per_node
        stages = [fixed["zero_stage"]] if "zero_stage" in fixed else range(4)
        sizes = [fixed["ep_size"]] if "ep_size" in fixed else [n for n in range(1, world + 1) if world % n == 0]
        # 1f1b, the default, requires the fewest micro-batches and layers of all schedules.
        pipelines = [fixed["pp_size"]] if "pp_size" in fixed else list(divisors(world))
        given = {name: value for name, value in fixed.items() if name not in ("zero_stage", "ep_size", "pp_size")}
        layouts = (
            ParallelLayout(world, ep_size=e, zero_stage=z, pp_size=p, **given)
            for e in sizes
            for z in stages
            for p in pipelines
        )
        return any(feasibility.refusal(layout) is None for layout in layouts)

    return [nodes for nodes in range(settings.min_nodes, settings.max_nodes + 1) if runs(nodes)]


def check_bounds(config: RunConfig, ranks_per_node: int) -> None:
    """Raises UserError if no number of nodes within the bounds is feasible; the message names the nearest one."""
    settings = _settings(config)
    if possible_nodes(config, ranks_per_node):
        return
    wider = settings.model_copy(update={"min_nodes": 1, "max_nodes": 2 * settings.max_nodes})
    elsewhere = replace(config, m6=config.m6.model_copy(update={"elastic": wider}))
    nearest = min(
        possible_nodes(elsewhere, ranks_per_node),
        key=lambda nodes: min(abs(nodes - settings.min_nodes), abs(nodes - settings.max_nodes)),
        default=None,
    )
    batch, micro_batch = config.deepspeed.train_batch_size, config.deepspeed.micro_batch_size
    raise UserError(
        f"m6.elastic: no number of nodes from {settings.min_nodes} to {settings.max_nodes} with {ranks_per_node} ranks "
        f"each can run it: train_batch_size {batch} must have a micro-batch of {micro_batch} for each rank, and "
        "ep_size divide the ranks" + ("" if nearest is None else f"; {nearest} could")
    )


def _layouts(config: RunConfig, node: Cluster, profile: Profile) -> tuple[list[Decision], dict[int, str]]:
    """The fastest layouts by number of nodes within the bounds, and the reasons for numbers without a layout."""
    settings, found, refusals = _settings(config), [], {}
    per_node, feasibility = node.nodes[0].devices_per_node, Feasibility(config)
    for nodes in range(settings.min_nodes, settings.max_nodes + 1):
        planner = Planner(
            config,
            node.resized(nodes * per_node),
            profile,
            sharing=config.last_sharing,
            forced=_fixed(config),
            feasibility=feasibility,
        )
        unfitted = planner.changed(profile=profile.model_copy(update={"factors": {}}))
        try:
            result = planner.search()
            best = result.best  # raises UserError if nothing fits the memory
        except UserError as error:
            refusals[nodes] = str(error)
            continue
        plans = [best, *(plan for plan in result.plans if plan.layout != best.layout)]
        found += [
            Decision(nodes, plan.layout, plan.time.total, unfitted.time(plan.layout).parts(), "") for plan in plans
        ]
    return found, refusals


def _fixed(config: RunConfig) -> dict[str, Any]:
    """The fixed choices, by the names of ``ParallelLayout``."""
    allowed = _settings(config).may_change
    if allowed is None:
        kept = () if config.m6.training.deterministic is None else FIXED_SUMS
        allowed = [name for name in CHANGEABLE if name not in kept]
    own, free = choices_of(config), {*allowed, "shares"}  # shares depend on the number of ranks
    if "pipeline" in free:
        free |= {"pp_size", "schedule", "cut"}
    return {name: own[name] for name in DIMENSIONS if name not in free}


def _learned(profile: Profile, history: Sequence[LayoutRecord], measured: Sequence[float | None]) -> Profile:
    """``profile`` with factors of the parts of a step, fitted to the run's own measurements."""
    seen = [(r.parts, seconds) for r, seconds in zip(history, measured, strict=True) if seconds is not None]
    if not seen:
        return profile
    parts, times = zip(*seen, strict=True)
    return profile.model_copy(update={"factors": fit_factors(parts, times)})


def _settings(config: RunConfig) -> ElasticSettings:
    if config.m6.elastic is None:
        raise UserError("m6.elastic is missing: it says between which numbers of nodes the run may change")
    return config.m6.elastic


def node_of(config: RunConfig, ranks_per_node: int) -> Cluster:
    """The nodes of the job: the description in ``m6.elastic.cluster``, or nodes like this machine.

    Raises:
        UserError: the description is missing, has no network, or has other ranks on a node.
    """
    settings = _settings(config)
    if settings.cluster is None:
        found = detect_cluster(ranks_per_node)
        if settings.max_nodes > 1 and found.nodes[0].links.network is None:
            raise UserError(
                f"m6.elastic.cluster is missing: {found.nodes[0].device.name} is known without a network; describe "
                "your nodes as in configs/clusters"
            )
        return found
    cluster = load_cluster(settings.cluster)
    per_node = cluster.nodes[0].devices_per_node
    if len(cluster.nodes) > 1 or per_node != ranks_per_node:
        raise UserError(
            f"m6.elastic.cluster {settings.cluster}: expected one type of nodes with {ranks_per_node} devices, the "
            f"ranks of a node of this job; found {', '.join(str(each.devices_per_node) for each in cluster.nodes)}"
        )
    return cluster
