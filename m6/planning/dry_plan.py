"""Plans the offloading of one rank of a large job from a dry trace of a step, without the job's memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

from m6.architecture.sharing import Sharing
from m6.config.checks import check_world_size
from m6.config.run import RunConfig
from m6.errors import UserError
from m6.formatting import format_mib, markdown_table
from m6.planning.cost.step_time import MEMORY_FRACTION
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.profile import Profile
from m6.planning.search.stages import pseudo_sharing
from m6.training.fake_world import fake_process_group
from m6.training.offloading.modules import experts_of
from m6.training.offloading.setup import MIB, OffloadSetup, model_of_rank, plan_offload
from offload import Rates, SimulatedDevice, StepTimes, lay_out, predict_times, sizes_of, staging_bytes


@dataclass(frozen=True)
class DryPlan:
    """The offload plan of a phase.

    Attributes:
        stage: the phase, "pseudo" or "real".
        setup: the trace of a step and its plan.
        chunks: number of chunks.
        expert_bytes: bytes of all experts with gradients and optimizer state.
        owned_bytes: bytes of experts owned by the device.
        host_bytes: bytes of experts in host memory, and of staging blocks.
        peak_bytes: the peak on the device: the rest of the model, and chunks owned, kept or in use.
        times: predicted times of the copies of a step.
        seconds: duration of the dry run.
    """

    stage: str
    setup: OffloadSetup
    chunks: int
    expert_bytes: int
    owned_bytes: int
    host_bytes: int
    peak_bytes: int
    times: StepTimes
    seconds: float


def dry_plans(config: RunConfig, world_size: int, rank: int, nodes: Nodes | None) -> list[DryPlan]:
    """Traces a step of ``rank`` in each phase with the real code on fake tensors, and plans it with the real solver.

    Args:
        nodes: the nodes of the job. Their memory is the budget if ``m6.offload`` says "auto".

    Raises:
        UserError: a budget is unknown or too small, or the run does not fit ``world_size``.
    """
    check_world_size(config, world_size)
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank}: expected one of 0 to {world_size - 1}")
    stages: list[tuple[str, Sharing | None]] = [("real", None)]
    if config.m6.pseudo_to_real is not None:
        stages.insert(0, ("pseudo", pseudo_sharing(config)))
    return [_plan(config, world_size, rank, nodes, *stage) for stage in stages]


def _plan(
    config: RunConfig, world_size: int, rank: int, nodes: Nodes | None, stage: str, sharing: Sharing | None
) -> DryPlan:
    begin, settings = time.perf_counter(), config.expert_store
    assert settings is not None
    if isinstance(settings.chunk_mib, str):
        raise UserError('m6.offload.chunk_mib: "auto" is chosen by all ranks together; a dry run needs a number')
    installed = None if nodes is None else nodes.device.memory_bytes
    host_share = None if nodes is None else nodes.host.memory_bytes // nodes.devices_per_node
    device_bytes = _budget("device_budget_mib", settings.device_budget_mib, installed)
    host_bytes = _budget("host_budget_mib", settings.host_budget_mib, host_share)
    link = None if nodes is None else nodes.links.host
    attained = 0.0 if link is None else link.bandwidth_bytes_per_s * Profile().bandwidth_efficiency
    rates = Rates(attained, attained) if attained else Rates()
    device = SimulatedDevice(device_bytes, rates=rates)
    with fake_process_group(rank, world_size):
        uses = experts_of(model_of_rank(config, sharing))
        setup = plan_offload(uses, config, device, device_bytes, host_bytes, sharing)
    if setup.plan is None:
        raise UserError(f"m6.offload, {stage} stage: {setup.shortage}")
    stacks = [use.stack(name) for name, use in uses.items()]
    sizes = sizes_of(
        lay_out(stacks, setup.chunk_bytes, setup.dtype, setup.gradient_dtype, setup.optimizer, setup.next_weights)
    )
    everything, owned = sum(size.owned for size in sizes), sum(sizes[chunk].owned for chunk in setup.plan.owned)
    resident = zip(setup.plan.resident_bytes(sizes), setup.trace.moments, strict=True)
    return DryPlan(
        stage=stage,
        setup=setup,
        chunks=len(sizes),
        expert_bytes=everything,
        owned_bytes=owned,
        host_bytes=everything - owned + staging_bytes(sizes),
        peak_bytes=max(chunks + moment.nonmodel_bytes for chunks, moment in resident),
        times=predict_times(setup.plan, sizes, rates),
        seconds=time.perf_counter() - begin,
    )


def _budget(key: str, stated: float | str, installed: int | None) -> int:
    if not isinstance(stated, str):
        return int(stated * MIB)
    if installed is None:
        raise UserError(f'm6.offload.{key} is "auto": a dry run takes it from a cluster; name one with --cluster')
    return int(installed * MEMORY_FRACTION)


def report(plans: list[DryPlan], world_size: int, rank: int) -> str:
    """Formats the plans as a table."""
    rows = []
    for plan in plans:
        placed = plan.setup.plan
        assert placed is not None
        rows.append(
            [
                plan.stage,
                f"{plan.chunks:,}",
                format_mib(plan.expert_bytes),
                f"{len(placed.owned):,}, {format_mib(plan.owned_bytes)}",
                f"{format_mib(plan.peak_bytes)} of {format_mib(plan.setup.device.budget_bytes)}",
                format_mib(plan.host_bytes),
                f"{format_mib(placed.upload_bytes)}, {format_mib(placed.download_bytes)}",
                f"{plan.times.uploads:.2f}, {plan.times.downloads:.2f}",
            ]
        )
    columns = ["stage", "chunks", "experts with gradients and states", "owned by the device", "device, at most"]
    columns += ["host", "moved a step: up, down", "seconds of copies: up, down"]
    took = sum(plan.seconds for plan in plans)
    return (
        f"Rank {rank} of {world_size}: one step on fake tensors, planned by the offload's solver, in {took:.0f} s.\n\n"
        + markdown_table(columns, rows, "lrrrrrrr")
    )
