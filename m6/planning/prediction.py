"""What a run was predicted to need, kept beside it, and what it needed."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from m6.config.run import RunConfig
from m6.errors import UserError
from m6.files import write_json
from m6.planning.activations import BatchShape
from m6.planning.detect import detect_cluster
from m6.planning.fit import fit_factors, fit_memory, kendall_tau, regret
from m6.planning.footprint import Footprint
from m6.planning.layout import layout_of
from m6.planning.profile import Profile
from m6.planning.search import Plan, Planner, giga

_FILE = "plan.json"


def predict_run(config: RunConfig, world_size: int, batch: BatchShape, profile: Profile) -> Plan:
    """The price of a run's own layout on the machine that it finds itself on.

    Raises:
        UserError: no description knows the device.
    """
    planner = Planner(config, detect_cluster(world_size), profile, batch)
    layout = layout_of(config, world_size)
    return Plan(layout, planner.memory(layout), planner.time(layout))


def announce(run: Path, config: RunConfig, world_size: int, batch: BatchShape, profile: Profile) -> str:
    """Predicts, keeps the prediction in the run's folder and says it; says why not where the machine is unknown."""
    try:
        plan = predict_run(config, world_size, batch, profile)
    except UserError as error:
        return f"no plan: {error}"
    return write_prediction(run, plan, profile)


def write_prediction(run: Path, plan: Plan, profile: Profile) -> str:
    """Keeps the prediction as RUN/plan.json and returns it in one line."""
    layout, factors = asdict(plan.layout), {part: profile.factor(part) for part in profile.factors}
    memory, process = _measurable(plan.footprint)
    write_json(
        run / _FILE,
        {
            "layout": layout,
            "profile": profile.source,
            "factors": factors,
            "seconds": plan.time.parts(),
            "bytes": plan.footprint.parts(),
            "activation_factor": profile.activation_factor,
            "memory_bytes": memory,
            "process_bytes": process,
        },
    )
    stamp = "" if profile.calibrated else " (uncalibrated)"
    return (
        f"plan: {plan.layout}: {plan.time.total:.3g} s a step{stamp}, "
        f"memory at most {giga(plan.footprint.peak)} a rank and {giga(plan.footprint.host)} offloaded"
    )


def _measurable(footprint: Footprint) -> tuple[int, int | None]:
    """What ``memory_bytes`` of the metrics shows, and what of it is the process: all of it on a CPU, torch's own on a
    GPU."""
    if torch.cuda.is_available():
        return footprint.peak - footprint.process, None
    return footprint.peak + footprint.host + footprint.host_process, footprint.host_process


@dataclass(frozen=True)
class Outcome:
    """Prediction and measurement of one run; times in seconds, memory in bytes.

    Attributes:
        parts: predicted seconds without fitted factors.
        predicted_bytes: with the factors of that time.
        activations: predicted bytes without a factor.
        process: predicted bytes of the process itself; None on a GPU, where they are not measured.
        states: predicted bytes of everything else.
        measured_s: of a step but for waiting for data and for checkpoints.
    """

    run: Path
    layout: dict[str, Any]
    parts: dict[str, float]
    predicted_bytes: int
    activations: float
    process: int | None
    measured_s: float
    measured_bytes: int
    states: float

    def seconds(self, profile: Profile) -> float:
        """Predicted with the factors of ``profile``."""
        factors: dict[Any, float] = dict(profile.factors)
        return sum(value * factors.get(name, 1.0) for name, value in self.parts.items())

    def bytes(self, profile: Profile) -> float:
        """The same of memory."""
        return (
            self.states
            + (0 if self.process is None else profile.host_bytes)
            + profile.activation_factor * self.activations
        )


def read_outcome(run: Path) -> Outcome:
    """Reads RUN/plan.json and the median step of RUN/metrics.jsonl, of which the first line does not count.

    Raises:
        UserError: a file is missing or holds no steps.
    """
    try:
        plan = json.loads((run / _FILE).read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: no such file; `m6 pretrain` writes it") from None
    except ValueError as error:
        raise UserError(f"{run}: not readable: {error}") from None
    steps = [line for line in lines if "step_time_s" in line]
    if not steps:
        raise UserError(f"{run / 'metrics.jsonl'}: holds no steps")
    warm = steps[1:] or steps
    waits = ("data_wait_s", "checkpoint_stall_s")
    return Outcome(
        run=run,
        layout=plan["layout"],
        parts={name: value / plan["factors"].get(name, 1.0) for name, value in plan["seconds"].items()},
        predicted_bytes=plan["memory_bytes"],
        activations=plan["bytes"]["activations"] / plan["activation_factor"],
        process=plan["process_bytes"],
        states=plan["memory_bytes"] - (plan["process_bytes"] or 0) - plan["bytes"]["activations"],
        measured_s=statistics.median(line["step_time_s"] - sum(line[wait] for wait in waits) for line in warm),
        measured_bytes=max(line["memory_bytes"] for line in steps),
    )


def outcome_line(run: Path) -> str:
    """Measured against predicted, for the end of a run; empty where nothing was predicted."""
    if not (run / _FILE).exists():
        return ""
    plan = json.loads((run / _FILE).read_text(encoding="utf-8"))
    found = read_outcome(run)
    seconds = sum(plan["seconds"].values())
    return (
        f"measured: {found.measured_s:.3g} s a step (plan {seconds:.3g}), memory of the process "
        f"{giga(found.measured_bytes)} (plan at most {giga(found.predicted_bytes)})"
    )


def validation_table(outcomes: list[Outcome], profile: Profile) -> str:
    """Errors of each run, as ``profile`` would have predicted it; of several also rank correlation and regret."""
    lines = [
        "| run | ranks | step s, predicted | measured | error | memory GB, predicted | measured | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in outcomes:
        seconds, memory = each.seconds(profile), each.bytes(profile)
        lines.append(
            f"| {each.run.name} | {each.layout['world_size']} | {seconds:.4g} | {each.measured_s:.4g} | "
            f"{seconds / each.measured_s - 1:+.1%} | {memory / 1e9:.3f} | "
            f"{each.measured_bytes / 1e9:.3f} | {memory / each.measured_bytes - 1:+.1%} |"
        )
    if len(outcomes) > 1:
        times, measured = [each.seconds(profile) for each in outcomes], [each.measured_s for each in outcomes]
        lines += ["", f"Kendall's tau {kendall_tau(times, measured):.2f}, regret {regret(times, measured):.1%}."]
    return "\n".join(lines)


def refit(profile: Profile, outcomes: list[Outcome]) -> Profile:
    """``profile`` with the factors, and the memory of a process, that these runs show."""
    factors = fit_factors([each.parts for each in outcomes], [each.measured_s for each in outcomes])
    measured = [each.measured_bytes for each in outcomes]
    on_cpu = any(each.process is not None for each in outcomes)
    # Where nothing was calibrated, a process is taken to be half of the smallest.
    calibrated = (max(each.process or 0 for each in outcomes) or min(measured) / 2) if on_cpu else 0
    states, activations = [each.states for each in outcomes], [each.activations for each in outcomes]
    constant, activation_factor = fit_memory(states, activations, measured, calibrated)
    changes: dict[str, Any] = {"factors": factors, "activation_factor": activation_factor}
    if on_cpu:
        changes["host_bytes"] = max(0, round(constant))
    return profile.model_copy(update=changes)
