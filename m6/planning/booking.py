"""The cost of a run on a cluster: days, GPU-days, jobs, and the limiting part of a step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from m6.formatting import markdown_table
from m6.model.parameters import num_parameters
from m6.planning.cost.compute_time import StepTime
from m6.planning.cost.step_time import TimeModel
from m6.planning.loss import LossPrediction, loss_document, loss_line, predicted_loss
from m6.planning.search.job_files import checkpoint_s, signal_lead_s
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout
from m6.planning.search.stages import stage_samples, stage_steps
from moe.expectation import ExpectedRouting

_DAY_S = 86400.0
MANY_WITHOUT_EXPERT = 0.05  # share of the tokens


@dataclass(frozen=True)
class StageEstimate:
    """A phase of a run (Pseudo or Real) with its plan.

    Attributes:
        stage: the phase, "pseudo" or "real".
        layout: the planner's description of it.
        steps: of the phase. A Pseudo phase counts up to ``switch_step``, even if it may end earlier.
        step_s: seconds of a step of the whole batch.
        step_s_range: the same on the fastest and the slowest expected machine; on GPUs at least as wide as the largest
            errors seen there.
        samples: of all steps.
        samples_per_s, tokens_per_s: of all devices in such a step; padding counts as tokens.
        days: of all steps and of the waits for checkpoints. Steps of ``m6.training.batch_ramp`` count by their samples.
            With ``m6.checkpoint.async_save: false`` training waits for each checkpoint, else only for the excess over
            the steps until the next one.
        days_range: the same from ``step_s_range``.
        gpu_days: days times devices.
        device_gb: memory of the fullest device, in GB of 10^9 bytes.
        host_gb: memory of a node's host.
        mfu: FLOPs of the forward and backward pass over the peak of the devices. Recomputation does not count. Choices
            dropped by the capacity do not count either; their number is an expectation.
        experts_per_token: routed experts of a token within the capacity, in a sparse layer; an expectation for a
            balanced router. 0 for a dense model.
        tokens_without_expert: the share of tokens of a sparse layer without an expert; an expectation, too.
        active_parameters: parameters of a token's computation, with ``experts_per_token`` experts.
        exposed_s: seconds a step of exposed communication and host work: computation waits for it.
        hidden_s: seconds a step of communication and host work overlapped with computation.
        limited_by: the longest part of a step.
        jobs: jobs of the time limit, one after the other; None: the limit is too short for a step and a checkpoint.
        parts: seconds of a step by part.
        range_source: the meaning of the range of the days, as a sentence.
    """

    stage: str
    layout: str
    steps: int
    step_s: float
    step_s_range: tuple[float, float]
    samples: int
    samples_per_s: float
    tokens_per_s: float
    days: float
    days_range: tuple[float, float]
    gpu_days: float
    device_gb: float
    host_gb: float
    mfu: float
    experts_per_token: float
    tokens_without_expert: float
    active_parameters: int
    exposed_s: float
    hidden_s: float
    limited_by: str
    jobs: int | None
    parts: dict[str, float]
    range_source: str


def book_stage(planner: Planner, plan: PricedLayout, time_limit_min: int) -> StageEstimate:
    """The cost of one phase of a run."""
    config, cluster, time = planner.config, planner.cluster, plan.time
    batch = config.deepspeed.train_batch_size
    steps = stage_steps(planner)
    # Steps of the batch ramp have fewer samples, so count the samples of the phase in whole batches.
    whole_steps = stage_samples(planner) / batch
    fastest, slowest = _step_s_range(planner, plan)
    saving, checkpoint = config.m6.checkpoint, checkpoint_s(planner, plan)

    def days_of(step_s: float) -> float:
        beside = saving.interval_steps * step_s if saving.async_save else 0.0
        waits_s = steps / saving.interval_steps * max(0.0, checkpoint - beside)
        return (whole_steps * step_s + waits_s) / _DAY_S

    days = days_of(time.total)
    routing = planner.memory.expected_routing(plan.layout) or ExpectedRouting(0.0, 0.0)
    job_s = time_limit_min * 60 - signal_lead_s(planner, plan)
    return StageEstimate(
        stage="real" if planner.memory.sharing is None else "pseudo",
        layout=str(plan.layout),
        steps=steps,
        step_s=time.total,
        step_s_range=(fastest, slowest),
        samples=stage_samples(planner),
        samples_per_s=batch / time.total,
        tokens_per_s=batch * config.m6.data.sequence_length / time.total,
        days=days,
        days_range=(days_of(fastest), days_of(slowest)),
        gpu_days=days * cluster.num_devices,
        device_gb=plan.footprint.peak / 1e9,
        host_gb=planner.host_bytes(plan.layout) / 1e9,
        mfu=planner.time.compute.model_flops(plan.layout) / (planner.time.peak_flops * time.total),
        experts_per_token=routing.experts_per_token,
        tokens_without_expert=routing.tokens_without_expert,
        active_parameters=num_parameters(config.model, None, routing.experts_per_token)["active_per_token"],
        exposed_s=time.exchange + time.reduction + time.host,
        hidden_s=planner.time.hidden_s(plan.layout),
        limited_by=_longest(time),
        jobs=math.ceil(days * _DAY_S / job_s) if job_s > 0 else None,
        parts=time.parts(),
        range_source=_range_line(planner, plan),
    )


def booking(stages: list[StageEstimate], planner: Planner) -> dict[str, Any]:
    """All phases and their sum, for ``--json``."""
    days = sum(stage.days for stage in stages)
    samples = sum(stage.samples for stage in stages)
    jobs = [stage.jobs for stage in stages]
    return {
        "cluster": planner.cluster.name,
        "devices": planner.cluster.num_devices,
        "calibrated": planner.profile.calibrated,
        "days": days,
        "days_range": [sum(stage.days_range[bound] for stage in stages) for bound in range(2)],
        "gpu_days": sum(stage.gpu_days for stage in stages),
        "samples": samples,
        "samples_per_s": samples / (days * _DAY_S),
        "tokens": samples * planner.config.m6.data.sequence_length,
        "device_gb": max(stage.device_gb for stage in stages),
        "host_gb": max(stage.host_gb for stage in stages),
        "jobs": None if None in jobs else sum(filter(None, jobs)),
        "loss": loss_document(_loss(stages, planner)),
        "stages": [asdict(stage) for stage in stages],
    }


def booking_table(stages: list[StageEstimate], planner: Planner, time_limit_min: int) -> str:
    """The same as a table."""
    total = booking(stages, planner)
    rows = [
        [
            stage.stage,
            f"{stage.steps:,}",
            f"{stage.step_s:.4g}",
            f"{stage.samples_per_s:,.0f}",
            format_days(stage.days, stage.days_range),
            f"{stage.gpu_days:,.0f}",
            _jobs(stage.jobs),
            f"{stage.mfu:.1%}",
            f"{stage.exposed_s / stage.step_s:.0%}",
            f"{stage.hidden_s / stage.step_s:.0%}",
            stage.limited_by,
        ]
        for stage in stages
    ]
    if len(stages) > 1:
        steps, speed = sum(stage.steps for stage in stages), f"{total['samples_per_s']:,.0f}"
        days = format_days(total["days"], total["days_range"])
        rows.append(["**in all**", f"{steps:,}", "", speed, days, f"{total['gpu_days']:,.0f}", _jobs(total["jobs"])])
        rows[-1] += [""] * 4
    jobs = f"jobs of {time_limit_min / 60:g} h"
    columns = ["stage", "steps", "step s", "samples/s", "days (range)", "GPU-days", jobs]
    columns += ["MFU", "exposed", "hidden", "longest part"]
    table = markdown_table(columns, rows, "lrrrrrrrrrl")
    return (
        f"{table}\n\n{total['samples'] / 1e6:,.1f} M samples, {total['tokens'] / 1e9:,.1f} B tokens with padding. "
        "Exposed and hidden: communication and host work, as shares of the step.\n\n"
        + "".join(f"{line}\n\n" for line in dict.fromkeys(stage.range_source for stage in stages))
        + f"{_experts_line(stages[-1], planner)}{loss_line(_loss(stages, planner), planner.config)}"
    )


def _loss(stages: list[StageEstimate], planner: Planner) -> LossPrediction:
    """The loss at the end of the run, with the expected experts per token of the last phase."""
    computed = stages[-1].experts_per_token or None
    return predicted_loss(planner.config, planner.config.m6.training.total_steps, computed)


def _experts_line(stage: StageEstimate, planner: Planner) -> str:
    """The number of experts of a token, and the keys of the capacity; empty for a dense model."""
    if planner.config.model.moe is None:
        return ""
    moe = planner.config.model.moe_config()
    line = (
        f"Experts that compute a token of a sparse layer: {stage.experts_per_token:.4g} of {moe.experts_per_token} "
        f"that it chooses, {stage.active_parameters / 1e9:,.2f} B active parameters in all"
    )
    if moe.capacity_factor is None:
        return f"{line}.\n\n"
    share = f"{stage.tokens_without_expert:.1%}"
    if stage.tokens_without_expert > MANY_WITHOUT_EXPERT and not moe.num_shared_experts:
        share = f"**{share}**"
    return (
        f"{line}. {share} of the tokens have no expert in a layer (m6.moe.capacity_factor {moe.capacity_factor:g}, "
        f'capacity_rule "{moe.capacity_rule}", drop_order "{moe.drop_order}"). Both are expected of a balanced router '
        "with random choices; one that is not balanced drops more.\n\n"
    )


def _step_s_range(planner: Planner, plan: PricedLayout) -> tuple[float, float]:
    """Seconds of the fastest and of the slowest expected step."""
    fastest, slowest = (
        TimeModel(planner.config, planner.cluster, profile, planner.memory)(plan.layout).total
        for profile in planner.profile.bounds()
    )
    _, error = _seen_error(planner, plan)
    return fastest, max(slowest, plan.time.total * (1 + error))


def _seen_error(planner: Planner, plan: PricedLayout) -> tuple[str, float]:
    """See ``Profile.seen_error``; 0 on CPUs."""
    layout = plan.layout
    on_host = layout.stream_experts or layout.offload_optimizer or layout.offload_params
    kind, error = planner.profile.seen_error(layout.checkpointing, on_host)
    return kind, 0.0 if planner.cluster.smallest.links.host is None else error


def _range_line(planner: Planner, plan: PricedLayout) -> str:
    """The meaning of the range of the days."""
    kind, error = _seen_error(planner, plan)
    if planner.profile.factors:
        return "The range is a fifth of the prediction to both sides: factors were fitted to runs."
    rates = "a calibration" if planner.profile.calibrated else "assumed efficiencies"
    if not error:
        return f"Nothing of the kind has run: days and range are predicted from {rates}."
    return (
        f"Nothing of the kind has run: days are predicted from {rates}, and no run on several GPUs was compared with a "
        f"prediction. The range is at least as wide as the largest error on one H100, where {kind} took up to "
        f"{error:.0%} longer than predicted (scripts/benchmarks/results/gpu_training.md)."
    )


def _longest(time: StepTime) -> str:
    parts = time.parts()
    return max(parts, key=lambda name: parts[name])


def _jobs(jobs: int | None) -> str:
    return "none is long enough" if jobs is None else str(jobs)


def format_days(days: float, bounds: tuple[float, float] | list[float]) -> str:
    """Days with their range."""
    return f"{days:.3g} ({bounds[0]:.3g} to {bounds[1]:.3g})"
