"""Scores the planner's predictions of the measured cases: ``python -m scripts.benchmarks.planner.score``.

Reads results/planner_cpu.csv and the machine's calibration, results/planner_cpu_profile.json, which ``m6 plan
calibrate`` made. The profile's factors are fitted to the cases marked "fit", as ``m6 plan validate --refit`` fits them
to runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m6.config.run import load_config
from m6.planning.machine.calibration import fit_factors, fit_memory, kendall_tau, regret
from m6.planning.machine.cluster import load_cluster
from m6.planning.machine.profile import Profile, load_profile
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout
from m6.training.sizes import BatchShape
from scripts.benchmarks.planner.cases import CASES, CONFIG, MODELS, Case
from scripts.benchmarks.planner.measure import TABLE
from scripts.benchmarks.record import RESULTS, Recorder

PROFILE = RESULTS / "planner_cpu_profile.json"
_SHAPE = ("rows", "sequence_length", "real", "targets", "pictures")


@dataclass(frozen=True)
class Measured:
    """A case with what was measured in all rounds.

    Attributes:
        step_s: of every step the least of all rounds, of these the median.
        memory_bytes: of the fullest rank, the most of all rounds.
        rounds_s: the median step of every round.
    """

    case: Case
    shape: BatchShape
    step_s: float
    memory_bytes: float
    rounds_s: tuple[float, ...]
    cores: int
    loads: tuple[float, ...]


def read_measured() -> list[Measured]:
    found = []
    for case in CASES:
        rows = [row for row in TABLE.rows() if row["case"] == case.name]
        if not rows:
            continue
        steps = zip(*([float(value) for value in row["steps_s"].split()] for row in rows), strict=True)
        shape = BatchShape(case.layout.micro_batch_size, *(int(rows[0][name]) for name in _SHAPE))
        found.append(
            Measured(
                case,
                shape,
                statistics.median(min(values) for values in steps),
                max(float(row["memory_bytes"]) for row in rows if row["memory_bytes"]),
                tuple(float(row["step_s"]) for row in rows),
                int(rows[0]["cores"]),
                tuple(float(row["load"]) for row in rows),
            )
        )
    return found


def predict(measured: Measured, profile: Profile) -> PricedLayout:
    """What ``m6 pretrain --profile`` would have said."""
    case = measured.case
    settings = tuple(f"{key}={json.dumps(value)}" for key, value in case.overrides().items())
    cluster = load_cluster(Path("cpu_laptop"))
    nodes = cluster.nodes[0]
    host = nodes.host.model_copy(update={"cpus": measured.cores})
    nodes = nodes.model_copy(update={"devices_per_node": case.layout.world_size, "host": host})
    cluster = cluster.model_copy(update={"nodes": [nodes]})
    planner = Planner(load_config(Path(CONFIG), settings), cluster, profile, measured.shape)
    return PricedLayout(case.layout, planner.memory(case.layout), planner.time(case.layout))


def main() -> None:
    recorder = Recorder("planner_cpu", "Predictions against measured configurations of one to four processes")
    measured = read_measured()
    raw = load_profile(PROFILE)
    fitted = fit_profile(raw, [each for each in measured if each.case.fit])
    tested = [each for each in measured if not each.case.fit]
    profiles = {"calibrated and fitted": fitted, "calibrated": raw, "assumed": Profile()}
    scores = {name: score(tested, profile) for name, profile in profiles.items()}
    table = [_row(each, predict(each, fitted)) for each in measured]
    numbers = {"scores": scores, "factors": fitted.factors, "host_bytes": fitted.host_bytes}
    numbers["activation_factor"] = fitted.activation_factor
    header = ["configuration", "use", "step s measured", "predicted", "error", "GB measured", "predicted", "error"]
    recorder.write(header, table, _notes(measured, tested, scores, fitted), numbers)


def fit_profile(profile: Profile, measured: Sequence[Measured]) -> Profile:
    """``profile`` with the factors and the memory of a process that these configurations show."""
    plans = [predict(each, profile) for each in measured]
    factors = fit_factors([plan.time.parts() for plan in plans], [each.step_s for each in measured])
    constant, activation_factor = fit_memory(
        [plan.footprint.peak - plan.footprint.activations for plan in plans],
        [plan.footprint.activations for plan in plans],
        [each.memory_bytes for each in measured],
        profile.host_bytes,
    )
    update = {"factors": factors, "activation_factor": activation_factor, "host_bytes": round(constant)}
    return profile.model_copy(update=update)


def score(measured: Sequence[Measured], profile: Profile) -> dict[str, Any]:
    """Errors of all, and for every model by itself whether the planner would have chosen its fastest layout."""
    plans = [predict(each, profile) for each in measured]
    errors = [abs(_memory(plan) / each.memory_bytes - 1) for plan, each in zip(plans, measured, strict=True)]
    times, found = [plan.time.total for plan in plans], [each.step_s for each in measured]
    regrets, taus = {}, {}
    for model in MODELS:
        chosen = [index for index, each in enumerate(measured) if each.case.model == model]
        pair = [times[index] for index in chosen], [found[index] for index in chosen]
        regrets[model], taus[model] = regret(*pair), kendall_tau(*pair)
    return {
        "configurations": len(measured),
        "memory_mean_error": statistics.mean(errors),
        "memory_max_error": max(errors),
        "memory_within_tenth": sum(error <= 0.1 for error in errors),
        "time_mean_error": statistics.mean(abs(p / m - 1) for p, m in zip(times, found, strict=True)),
        "tau": kendall_tau(times, found),
        "tau_by_model": taus,
        "regret_by_model": regrets,
    }


def _memory(plan: PricedLayout) -> int:
    return plan.footprint.peak + plan.footprint.host + plan.footprint.host_process


def _row(measured: Measured, plan: PricedLayout) -> list[str]:
    seconds, memory = plan.time.total, _memory(plan)
    return [
        measured.case.name,
        "fit" if measured.case.fit else "test",
        f"{measured.step_s:.3f}",
        f"{seconds:.3f}",
        f"{seconds / measured.step_s - 1:+.0%}",
        f"{measured.memory_bytes / 1e9:.3f}",
        f"{memory / 1e9:.3f}",
        f"{memory / measured.memory_bytes - 1:+.1%}",
    ]


def _notes(
    measured: Sequence[Measured], tested: Sequence[Measured], scores: dict[str, dict[str, Any]], fitted: Profile
) -> str:
    header = [
        "profile",
        "memory: mean error",
        "worst",
        "within 10 %",
        "step: mean error",
        "tau",
        "tau by model",
        "regret",
    ]
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for name, each in scores.items():
        taus = ", ".join(f"{tau:.2f}" for tau in each["tau_by_model"].values())
        regrets = ", ".join(f"{value:.1%}" for value in each["regret_by_model"].values())
        lines.append(
            f"| {name} | {each['memory_mean_error']:.1%} | {each['memory_max_error']:.1%} | "
            f"{each['memory_within_tenth']} of {each['configurations']} | {each['time_mean_error']:.1%} | "
            f"{each['tau']:.2f} | {taus} | {regrets} |"
        )
    factors = ", ".join(f"{name} {value:.2f}" for name, value in fitted.factors.items())
    loads = [load for each in measured for load in each.loads]
    again = [max(each.rounds_s) / min(each.rounds_s) - 1 for each in measured if len(each.rounds_s) > 1]
    twice = f"by {statistics.median(again or [0.0]):.0%} in the median and {max(again or [0.0]):.0%} at most"
    return f"""\
{chr(10).join(lines)}

Scored are the {len(tested)} configurations marked test; constants were fitted to the {len(measured) - len(tested)}
marked fit. Kendall's tau is over all of them, and of {", ".join(MODELS)} by themselves; regret is by how much, of each
model's tested layouts, the one that looked fastest is slower than the fastest. Two constants of the formulas, the
copies that ZeRO leaves in a CPU's memory and the calls of stage 3, were set when most tested ones had been seen.

Fitted factors: {factors}. A process without its tensors: {fitted.host_bytes / 1e9:.3f} GB; bytes held for each
predicted byte of activations: {fitted.activation_factor:.2f}.

The machine was shared: load {min(loads):.0f} to {max(loads):.0f} on two cores, at which time on the wall says nothing.
A step's time is therefore processor time: of the busiest rank, or of all over the two cores where there are four. What
ranks wait for each other on a quiet machine is not in it, nor in the calibration. The median steps of the
{len(again)} configurations that were measured twice differed {twice}. The table has the least of every step, and the
most memory. Ranks are forked from a process that has imported everything; two configurations whose ranks were started
afresh were 0.11 and 0.12 GB larger, which is a constant of the process and would be fitted as such."""


if __name__ == "__main__":
    main()
