"""Predictions of a run's memory and time: made at its start, kept in RUN/plan.json, compared with measurements."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import BaseModel, PositiveFloat, field_validator

from m6.architecture.sharing import Sharing
from m6.config.run import RunConfig, load_config
from m6.errors import UserError
from m6.files import parse_object, write_json
from m6.formatting import format_bytes, format_gb, format_mib, markdown_table
from m6.model.parameters import num_parameters
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.cost.memory import MemoryFootprint, MemoryModel
from m6.planning.cost.step_time import cost_models
from m6.planning.machine.cluster import Cluster, detect_cluster
from m6.planning.machine.profile import Profile
from m6.renamed import with_new_names
from m6.runs.directory import RunDirectory
from m6.training.sizes import BatchShape, full_row
from m6.validation import validate

_FILE = "plan.json"
_VALIDATION_HEADER = (
    "run",
    "ranks",
    "step s, predicted",
    "measured",
    "error",
    "memory GB, predicted",
    "measured",
    "error",
)


_KEYS_OF_PARTS = {
    "embeddings": "m6.model.text_vocab_size",
    "patch_encoder": "m6.model.patch_size",
    "attention": "m6.model.hidden_size",
    "ffn": "m6.model.ffn_hidden_size",
    "experts": "m6.moe.num_experts",
    "router": "m6.moe.num_experts",
    "norms": "m6.model.hidden_size",
}


def predict_memory(
    config: RunConfig, world_size: int, batch: BatchShape, sharing: Sharing | None = None
) -> MemoryFootprint:
    """The memory of the run's own layout on ``world_size`` ranks, without calibrated overheads, on the fullest rank.

    Args:
        batch: the shape of a micro-batch.
        sharing: what the layers share in the Pseudo phase; None: nothing.

    Raises:
        UserError: the run does not fit ``world_size``.
    """
    return MemoryModel(config, Profile(), batch, sharing)(layout_of(config, world_size))


def check_memory(config: RunConfig, world_size: int, ranks_per_node: int) -> None:
    """Raises UserError if this machine can never hold the run, before anything is allocated.

    Weights, gradients and optimizer state are compared with the whole memory. Only these count, since they are exact.

    Args:
        ranks_per_node: ranks of the run on this machine; they share its memory.
    """
    if config.m6.lora is not None:
        return  # the memory model does not know adapters; a run with adapters has fewer gradients
    memory_of = MemoryModel(config, Profile(), full_row(config), config.last_sharing)
    on_gpu = torch.cuda.is_available()
    # The ranks of a pipeline differ. Each has a GPU, so the fullest decides. A host may have any of them.
    footprint = (max if on_gpu else min)(
        memory_of.footprints(layout_of(config, world_size)), key=lambda each: each.resident
    )
    needed = footprint.resident + (0 if on_gpu else footprint.host)
    ranks = 1 if on_gpu else ranks_per_node
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else psutil.virtual_memory().total
    if ranks * needed > memory:
        counts = num_parameters(config.model, config.last_sharing)
        part = max(_KEYS_OF_PARTS, key=counts.__getitem__)
        holder = "the GPU of a rank" if on_gpu else f"each of the {ranks} ranks of this machine"
        raise UserError(
            f"{_KEYS_OF_PARTS[part]}: {holder} would hold {format_bytes(needed)} of weights, gradients and optimizer "
            f"state, most of it for the {part.replace('_', ' ')}, but there are {format_bytes(memory)} in all. Make "
            "the model smaller, or take more ranks, a higher ZeRO stage, m6.training.ep_size or m6.offload; m6 plan "
            "shows what fits"
        )


def describe_memory(footprint: MemoryFootprint) -> str:
    """A few lines about the memory of the fullest rank, for the start of a run."""
    old = f", those of the step before {format_mib(footprint.old_weights)}" if footprint.old_weights else ""
    lines = [
        "memory of the fullest rank, without buffers of collectives: at most "
        f"{format_mib(footprint.resident + footprint.activations)}",
        f"  weights {format_mib(footprint.weights)}{old}, gradients {format_mib(footprint.gradients)}, "
        f"optimizer state {format_mib(footprint.optimizer_state)}",
        f"  activations of one micro-batch, with gradients of its logits {format_mib(footprint.activations)}",
    ]
    if footprint.host:
        lines.append(f"  in host memory {format_mib(footprint.host)}")
    return "\n".join(lines)


def announce(run: Path, config: RunConfig, world_size: int, batch: BatchShape, profile: Profile) -> str:
    """Predicts the run, writes the prediction to its folder, and returns it as a line, or the reason against one."""
    try:
        cluster = detect_cluster(world_size)
        layout = layout_of(config, world_size)
        memory_of, time_of = cost_models(config, cluster, profile, batch, config.last_sharing)
        footprint, seconds = memory_of(layout), time_of(layout)
    except UserError as error:
        return f"no plan: {error}"
    factors = {part: profile.factor(part) for part in profile.factors}
    memory, process = _measurable(footprint)
    calibrated = profile.calibrated or bool(profile.factors)
    write_json(
        run / _FILE,
        {
            "layout": asdict(layout),
            "cluster": cluster.model_dump(mode="json", exclude_none=True),
            "batch": asdict(batch),
            "profile": profile.source,
            "calibrated": calibrated,
            "factors": factors,
            "seconds": seconds.parts(),
            "bytes": footprint.parts(),
            "activation_factor": profile.activation_factor,
            "memory_bytes": memory,
            "process_bytes": process,
        },
    )
    most = f"memory at most {format_gb(footprint.peak)} a rank and {format_gb(footprint.host)} offloaded"
    if not _predicts_seconds(calibrated):
        return f"plan: {layout}: {most}; seconds a step on a CPU need a profile of `m6 plan calibrate`"
    # The line stands in logs, far from the explanation of assumed efficiencies in the README.
    stamp = "" if calibrated else " (uncalibrated)"
    return f"plan: {layout}: {seconds.total:.3g} s a step{stamp}, {most}"


class RunForecast:
    """The forecast of a run for its trainer.

    Args:
        run: the run's folder.
        profile: the machine's calibration; None: assumed efficiencies.
    """

    def __init__(self, run: Path, config: RunConfig, world_size: int, profile: Profile | None = None) -> None:
        self._run, self._config, self._world_size = run, config, world_size
        self._profile = profile or Profile()

    def memory(self, batch: BatchShape, sharing: Sharing | None) -> str:
        """See ``describe_memory``."""
        return describe_memory(predict_memory(self._config, self._world_size, batch, sharing))

    def step(self, batch: BatchShape) -> str:
        """See ``announce``."""
        return announce(self._run, self._config, self._world_size, batch, self._profile)

    def outcome(self) -> str:
        """See ``outcome_line``."""
        return outcome_line(self._run)


def _predicts_seconds(calibrated: bool) -> bool:
    """Whether predicted seconds are worth printing: CPUs differ too much from each other for assumed efficiencies.

    Small steps on two cores took 2 to 22 times the prediction (scripts/experiments/first_contact).
    """
    return calibrated or torch.cuda.is_available()


def _measurable(footprint: MemoryFootprint) -> tuple[int, int | None]:
    """(predicted bytes of the metric ``memory_bytes``, bytes of the process among them).

    On a GPU the metric is PyTorch's allocated memory, without the process. On a CPU it is the whole process.
    """
    if torch.cuda.is_available():
        return footprint.peak - footprint.process, None
    return footprint.peak + footprint.host + footprint.host_process, footprint.host_process


@dataclass(frozen=True)
class Outcome:
    """Prediction and measurement of one run; times in seconds, memory in bytes.

    Attributes:
        run: the run's folder.
        layout: of the run.
        parts: predicted seconds by part, without fitted factors: from the start of the run, or by another profile, see
            ``read_outcome``.
        predicted_bytes: from the start of the run, with the factors of its profile.
        activations: predicted bytes of activations, without a factor.
        process: predicted bytes of the process; None on a GPU, where the metric leaves them out.
        measured_s: median of a step, without waits for data and for checkpoints.
        measured_bytes: the maximum over steps.
        states: predicted bytes of everything else.
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
        """Seconds of a step, predicted with the factors of ``profile``."""
        factors: dict[Any, float] = dict(profile.factors)
        return sum(value * factors.get(name, 1.0) for name, value in self.parts.items())

    def bytes(self, profile: Profile) -> float:
        """Bytes, predicted with the process and the activation factor of ``profile``."""
        return (
            self.states
            + (0 if self.process is None else profile.host_bytes)
            + profile.activation_factor * self.activations
        )


class _Record(BaseModel):
    """The prediction in RUN/plan.json; an older one has neither cluster nor batch."""

    layout: ParallelLayout
    cluster: Cluster | None = None
    batch: BatchShape | None = None
    factors: dict[str, PositiveFloat]
    seconds: dict[str, float]
    bytes: dict[str, float]
    activation_factor: PositiveFloat
    memory_bytes: int
    process_bytes: int | None

    @field_validator("bytes")
    @classmethod
    def _counts_activations(cls, value: dict[str, float]) -> dict[str, float]:
        if "activations" not in value:
            raise ValueError("activations: missing")
        return value

    def unfitted_seconds(self) -> dict[str, float]:
        """The seconds without the factors of the run's profile."""
        return {name: value / self.factors.get(name, 1.0) for name, value in self.seconds.items()}


def read_outcome(run: Path, profile: Profile | None = None) -> Outcome:
    """Reads RUN/plan.json and RUN/metrics.jsonl. The first step does not count, unless it is the only one.

    Args:
        profile: predicts the seconds again, with its rates; None: the prediction from the start of the run.

    Raises:
        UserError: a file is missing, unreadable or without steps.
    """
    try:
        found = parse_object((run / _FILE).read_bytes())
        plan = validate(_Record, {**found, "layout": with_new_names(found.get("layout"))}, "")
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: no such file; `m6 pretrain` writes it") from None
    except ValueError as error:
        raise UserError(f"{run / _FILE}: not readable: {error}") from None
    steps = [entry for entry in RunDirectory(run).read_metrics() if "step_time_s" in entry]
    if not steps:
        raise UserError(f"{run / 'metrics.jsonl'}: has no steps")
    warm = steps[1:] or steps  # the first step allocates memory and compiles kernels
    waits = ("data_wait_s", "checkpoint_stall_s")
    activations = plan.bytes["activations"]
    return Outcome(
        run=run,
        layout=asdict(plan.layout),
        parts=plan.unfitted_seconds() if profile is None else _predict_again(run, plan, profile),
        predicted_bytes=plan.memory_bytes,
        activations=activations / plan.activation_factor,
        process=plan.process_bytes,
        states=plan.memory_bytes - (plan.process_bytes or 0) - activations,
        measured_s=statistics.median(entry["step_time_s"] - sum(entry[wait] for wait in waits) for entry in warm),
        measured_bytes=max(entry["memory_bytes"] for entry in steps),
    )


def _predict_again(run: Path, plan: _Record, profile: Profile) -> dict[str, float]:
    """Seconds by part, predicted with the rates of ``profile`` and without its factors."""
    if plan.cluster is None or plan.batch is None:
        raise UserError(f"{run / _FILE}: has no cluster and no batch to predict the run again; validate a newer run")
    config = load_config(run / "config.json")
    unfitted = profile.model_copy(update={"factors": {}})
    _, time_of = cost_models(config, plan.cluster, unfitted, plan.batch, config.last_sharing)
    return time_of(plan.layout).parts()


def outcome_line(run: Path) -> str:
    """Measurement and prediction in one line, for the end of a run; empty where they cannot be read or compared.

    A finished run must not fail here: its metrics may have been removed, or its prediction may be damaged.
    """
    try:
        plan, found = parse_object((run / _FILE).read_bytes()), read_outcome(run)
        return _outcome_line(plan, found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return ""


def _outcome_line(plan: dict[str, Any], found: Outcome) -> str:
    calibrated = plan.get("calibrated", False)
    seconds = f" (plan {sum(plan['seconds'].values()):.3g})" if _predicts_seconds(calibrated) else ""
    predicted = f"at most {format_gb(found.predicted_bytes)}"
    # On a CPU the whole process is measured. Only a calibrated profile knows its memory without tensors.
    memory = f"the plan counts its tensors alone: {predicted}" if found.process == 0 else f"plan {predicted}"
    return (
        f"measured: {found.measured_s:.3g} s a step{seconds}, "
        f"memory {'of the process ' if found.process is not None else ''}{format_gb(found.measured_bytes)} ({memory})"
    )


def validation_table(outcomes: list[Outcome], profile: Profile) -> str:
    """Markdown: the errors of the predictions with ``profile``, run by run. For several runs also rank correlation and
    regret."""
    rows = []
    for each in outcomes:
        seconds, memory = each.seconds(profile), each.bytes(profile)
        rows.append(
            [
                each.run.name,
                str(each.layout["world_size"]),
                f"{seconds:.4g}",
                f"{each.measured_s:.4g}",
                f"{seconds / each.measured_s - 1:+.1%}",
                f"{memory / 1e9:.3f}",
                f"{each.measured_bytes / 1e9:.3f}",
                f"{memory / each.measured_bytes - 1:+.1%}",
            ]
        )
    lines = [markdown_table(_VALIDATION_HEADER, rows)]
    if len(outcomes) > 1:
        from m6.planning.machine.calibration import kendall_tau, regret

        times, measured = [each.seconds(profile) for each in outcomes], [each.measured_s for each in outcomes]
        lines += ["", f"Kendall's tau {kendall_tau(times, measured):.2f}, regret {regret(times, measured):.1%}."]
    return "\n".join(lines)


def refit(profile: Profile, outcomes: list[Outcome]) -> Profile:
    """``profile`` with factors and process memory fitted to these runs."""
    from m6.planning.machine.calibration import fit_factors, fit_memory

    factors = fit_factors([each.parts for each in outcomes], [each.measured_s for each in outcomes])
    measured = [each.measured_bytes for each in outcomes]
    on_cpu = any(each.process is not None for each in outcomes)
    # A start value for profiles without calibration: half of the smallest run.
    calibrated = (max(each.process or 0 for each in outcomes) or min(measured) / 2) if on_cpu else 0
    states, activations = [each.states for each in outcomes], [each.activations for each in outcomes]
    constant, activation_factor = fit_memory(states, activations, measured, calibrated)
    changes: dict[str, Any] = {"factors": factors, "activation_factor": activation_factor}
    if on_cpu:
        changes["host_bytes"] = max(0, round(constant))
    return profile.model_copy(update=changes)
