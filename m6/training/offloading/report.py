"""Reports on offloaded experts: the memory map as text, and the record for ``m6 plot --memory``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from m6.files import write_json
from m6.formatting import format_mib as mib
from m6.runs.directory import OFFLOAD
from m6.training.offloading.setup import ActivationTraffic
from offload import OffloadRuntime, PlacementPlan, predict_times

MEMORY_RECORD = Path(OFFLOAD) / "memory_rank_00000.json"
"""The memory record of rank 0 in the run's folder; each rank writes its own file."""


def memory_map(runtime: OffloadRuntime, plan: PlacementPlan, source: str, traffic: ActivationTraffic) -> str:
    """Describes the placement of the experts under ``plan`` and the bytes moved in a step, as text.

    Args:
        source: name of the trace of the plan.
        traffic: of offloaded activations.
    """
    sizes, device = runtime.sizes, runtime.device
    owned = sum(sizes[number].owned for number in plan.owned)
    nonmodel = max((moment.nonmodel_bytes for moment in plan.trace.moments), default=0)
    peak = max(
        (
            resident + moment.nonmodel_bytes
            for resident, moment in zip(plan.resident_bytes(sizes), plan.trace.moments, strict=True)
        ),
        default=0,
    )
    times = predict_times(plan, sizes, device.rates)
    lines = [
        f"offloaded experts, planned by {source}: {len(sizes)} chunks of at most "
        f"{mib(max(size.weight for size in sizes))}, {mib(sum(size.owned for size in sizes))} with "
        f"{'' if runtime.update_in_backward else 'gradients and '}optimizer state",
        f"  device, budget {mib(device.budget_bytes)}: owns {len(plan.owned)} chunks, {mib(owned)}; everything else "
        f"of the model at most {mib(nonmodel)}; together with resident chunks at most {mib(peak)}",
        f"  host: {mib(runtime.host_bytes)}"
        + (f", of which {mib(device.pageable_bytes)} could not be pinned" if device.pageable_bytes else ""),
        f"  moved per step: {mib(plan.upload_bytes)} up, {mib(plan.download_bytes)} down; no plan moves less than "
        f"{mib(plan.bound_bytes)}",
        f"  predicted time of the copies per step: {times.uploads:.3f} s up, {times.downloads:.3f} s down"
        + (
            f"; exposed beside {times.computation:.3f} s of computation: {times.exposed:.3f} s"
            if times.computation
            else ""
        ),
    ]
    if traffic.host_bytes:
        down, up = traffic.downloaded_bytes, traffic.uploaded_bytes
        lines.append(
            f"  activations on the host: {mib(traffic.host_bytes)}; moved per step: {mib(up)} up, {mib(down)} down "
            f"in {up / device.rates.upload:.3f} and {down / device.rates.download:.3f} s"
        )
    if device.pageable_bytes:
        # An estimate: it assumes equally frequent moves of pageable and pinned chunks.
        slow = device.pageable_bytes / (device.pageable_bytes + device.pinned_bytes) * plan.moved_bytes
        more = slow * (1 / device.rates.pageable - 1 / device.rates.upload)
        lines.append(f"  what could not be pinned costs about {more:.3f} s more per step")
    return "\n".join(lines)


def write_memory_record(root: Path, rank: int, runtime: OffloadRuntime, plan: PlacementPlan, step: int) -> None:
    """Records the planned and the measured memory at each use of a chunk in the finished step.

    Args:
        root: the run's folder.
        step: the number of the finished step, from 0.
    """
    stacks = {chunk.number: name for name in runtime.stacks for chunk in runtime.chunks_of(name)}
    record: dict[str, Any] = {
        "step": step,
        "device": type(runtime.device).__name__,
        "budget_bytes": runtime.device.budget_bytes,
        "activations": {"host_bytes": runtime.activations.host_bytes},
        "planned": [
            {
                "chunk": moment.chunk,
                "stack": stacks[moment.chunk],
                "backward": moment.backward,
                "nonmodel_bytes": moment.nonmodel_bytes,
                "chunk_bytes": resident,
            }
            for moment, resident in zip(plan.trace.moments, plan.resident_bytes(runtime.sizes), strict=True)
        ],
        "actual": [{"nonmodel_bytes": peaks.nonmodel, "total_bytes": peaks.total} for peaks in runtime.peaks],
    }
    folder = root / MEMORY_RECORD.parent
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"memory_rank_{rank:05d}.json", record)
