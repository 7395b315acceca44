"""A week of preemptions: what a fixed number of nodes, a fixed layout and a new plan at every start come to.

    python scripts/experiments/elastic/week.py        (writes week.csv and prints its tables)

Time runs on a virtual clock. Steps take what the planner predicts, and layouts are chosen by `m6 plan replan`'s code. A
node that goes takes the job with it: it loses the steps since its last checkpoint and begins again after RESTART_S on
the nodes that are there. Nodes that come are used at the next start, at the latest after TIME_LIMIT_H, or, by the last
policy, after GROW_S.
"""

from __future__ import annotations

import csv
import io
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from m6.config.run import RunConfig, load_config, parse_config  # noqa: E402
from m6.errors import UserError  # noqa: E402
from m6.files import write_text  # noqa: E402
from m6.formatting import markdown_table  # noqa: E402
from m6.planning.machine.cluster import Cluster, load_cluster  # noqa: E402
from m6.planning.replan import Decision, replan  # noqa: E402

WEEK_H = 7 * 24
RESTART_S = 300.0
TIME_LIMIT_H = 24
CHECKPOINT_S = 900.0
GROW_S = 600.0
NODES = 16


@dataclass(frozen=True)
class Policy:
    """How a run reacts.

    Attributes:
        elastic: keys of ``m6.elastic``.
        grows: whether the job is asked to stop, and saves, when nodes that it would use have been there for GROW_S.
    """

    elastic: dict[str, Any]
    grows: bool = False


POLICIES = {
    "16 nodes or none": Policy({"min_nodes": NODES, "may_change": []}),
    "the JSON's layout on any number": Policy({"may_change": []}),
    "a new plan at every start": Policy({}),
    "and a stop when more nodes are there": Policy({}, grows=True),
}


@dataclass(frozen=True)
class Case:
    """A run, on nodes of so many devices."""

    config: str
    devices: int
    overrides: tuple[str, ...] = ()


CASES = {
    "m6t_100b on nodes of 8 A100": Case("m6t_100b", 8),
    # 768 samples also divide over 12 nodes.
    "m6t_10b on nodes of one A100": Case("m6t_10b", 1, ("train_batch_size=768", "train_micro_batch_size_per_gpu=8")),
}


@dataclass
class Week:
    """What a policy came to.

    Attributes:
        steps: finished and saved, or finished by the end of the week.
        lost_s: seconds of steps that were computed twice.
        restart_s: seconds of starts.
        waiting_s: seconds without enough nodes.
        starts: attempts.
        node_hours: hours of nodes that the attempts used.
    """

    steps: float = 0.0
    lost_s: float = 0.0
    restart_s: float = 0.0
    waiting_s: float = 0.0
    starts: int = 0
    node_hours: float = 0.0


def trace() -> Iterator[tuple[float, int]]:
    """(second, nodes from then on) of a week: trace.csv, again and again."""
    rows = [(float(row["hours"]), int(row["nodes"])) for row in csv.DictReader((HERE / "trace.csv").open())]
    begin_h = 0.0
    while begin_h < WEEK_H:
        yield from (((begin_h + hours) * 3600, nodes) for hours, nodes in rows if begin_h + hours < WEEK_H)
        begin_h += rows[-1][0]


def configured(case: Case, policy: Policy) -> RunConfig:
    document = load_config(Path(case.config), case.overrides).document
    document["m6"]["elastic"] = {"max_nodes": NODES, **policy.elastic}
    return parse_config(document)


def decisions(config: RunConfig, node: Cluster) -> dict[int, Decision | None]:
    """The layout for each number of nodes; None if there is none."""
    found: dict[int, Decision | None] = {}
    for nodes in range(NODES + 1):
        try:
            found[nodes] = replan(config, node, nodes) if nodes else None
        except UserError:
            found[nodes] = None
    return found


def simulate(layouts: dict[int, Decision | None], grows: bool) -> Week:
    """Goes through the week; a checkpoint is written every CHECKPOINT_S while training goes on."""
    week, events, week_s = Week(), [*trace(), (WEEK_H * 3600.0, 0)], WEEK_H * 3600.0
    now = 0.0
    while now < week_s:
        number = sum(at <= now for at, _ in events)
        available = events[number - 1][1]
        decision = layouts[available]
        if decision is None:
            week.waiting_s += events[number][0] - now
            now = events[number][0]
            continue
        # The attempt ends when a node goes, when it is asked to stop, or with the week.
        ends = {"lost": first_loss(events[number - 1 :]), "limit": now + TIME_LIMIT_H * 3600}
        if grows:
            more = {nodes for nodes, other in layouts.items() if other is not None and other.nodes > decision.nodes}
            ends["more"] = first_growth(events[number:], more, now + RESTART_S)
        cause = min(ends, key=lambda name: ends[name])
        end = min(ends[cause], week_s)
        start_s = min(RESTART_S, end - now)
        trained_s = end - now - start_s
        # Asked to stop, the job saves; a node that goes takes what is not saved.
        lost_s = trained_s % CHECKPOINT_S if cause == "lost" and end < week_s else 0.0
        week.starts += 1
        week.restart_s += start_s
        week.lost_s += lost_s
        week.steps += (trained_s - lost_s) / decision.predicted_s
        week.node_hours += decision.nodes * (end - now) / 3600
        now = end
    return week


def first_loss(events: list[tuple[float, int]]) -> float:
    """When a node goes for the first time after the first event."""
    return next(at for (_, before), (at, nodes) in itertools.pairwise(events) if nodes < before)


def first_growth(events: list[tuple[float, int]], more: set[int], earliest: float) -> float:
    """When as many nodes as ``more`` have been there for GROW_S."""
    for (at, nodes), (until, _) in itertools.pairwise(events):
        asked = max(at + GROW_S, earliest)
        if nodes in more and asked < until:
            return asked
    return float("inf")


def main() -> None:
    rows = []
    for case_name, case in CASES.items():
        cluster = load_cluster(Path("a100_80g_x128"))
        node = cluster.model_copy(
            update={"nodes": [cluster.nodes[0].model_copy(update={"devices_per_node": case.devices})]}
        )
        whole = replan(configured(case, POLICIES["a new plan at every start"]), node, NODES)
        undisturbed = WEEK_H * 3600 / whole.predicted_s
        print(f"\n## {case_name}\n")
        for policy_name, policy in POLICIES.items():
            layouts = decisions(configured(case, policy), node)
            week = simulate(layouts, policy.grows)
            rows.append(
                {"run": case_name, "policy": policy_name, **vars(week), "of_undisturbed": week.steps / undisturbed}
            )
            if policy == POLICIES["a new plan at every start"]:
                print(layout_table(layouts), end="\n\n")
        print(week_table([row for row in rows if row["run"] == case_name]))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
    )
    write_text(HERE / "week.csv", text.getvalue())


def layout_table(layouts: dict[int, Decision | None]) -> str:
    """The layouts that are used, with the nodes for which they are chosen."""
    chosen: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for nodes, decision in layouts.items():
        name = "none fits" if decision is None else str(decision.layout)
        chosen.setdefault(name, []).append(nodes)
        seconds[name] = float("nan") if decision is None else decision.predicted_s
    lines = [
        [
            f"{nodes[0]} to {nodes[-1]}" if len(nodes) > 1 else str(nodes[0]),
            name,
            "" if name == "none fits" else f"{seconds[name]:.3g}",
        ]
        for name, nodes in chosen.items()
    ]
    return markdown_table(["nodes", "layout", "s a step"], lines, "rlr")


def week_table(rows: list[dict[str, Any]]) -> str:
    """What each policy came to."""
    lines = [
        [
            row["policy"],
            f"{row['steps']:,.0f}",
            f"{row['of_undisturbed']:.0%}",
            str(row["starts"]),
            *(f"{row[name] / 3600:.1f}" for name in ("waiting_s", "restart_s", "lost_s")),
            f"{row['node_hours']:,.0f}",
        ]
        for row in rows
    ]
    header = ["", "steps", "of 16 nodes left alone", "starts", "h waiting", "h starting", "h done again", "node hours"]
    return markdown_table(header, lines, "lrrrrrrr")


if __name__ == "__main__":
    main()
