"""What other systems' rules would move on the same step in the same memory: replays of rules, not runs of systems."""

from __future__ import annotations

from collections.abc import Callable

from offload.plan.trace import Moment
from scripts.benchmarks.offload.traces import Job

Choice = Callable[[set[int], int, list[int], dict[int, int]], int]
_PATRICKSTAR_STATES = 12  # fp32 master and moments, bytes per parameter


def zero_3_offload(job: Job) -> int:
    """ZeRO-Infinity on the host (arXiv 2104.07857) as DeepSpeed 0.19.8 runs it: nothing stays on the device.

    Every use fetches 16-bit weights; a gradient goes down in 16 bits, comes back to be cast and goes down in fp32.
    """
    moments = job.trace.moments
    again = {time for time in range(1, len(moments)) if moments[time].chunk == moments[time - 1].chunk}
    uses = sum(job.sizes[moment.chunk].weight for time, moment in enumerate(moments) if time not in again)
    return uses + (2 + 2 + 4) * job.parameters


def patrickstar(job: Job) -> int:
    """PatrickStar (arXiv 2108.05818): the chunk that is used last leaves, and is written back whether dirty or not.

    Weights have the device first; what is left at the peak of non-model memory holds fp32 states. For the part whose
    states are on the host a gradient goes down and a weight comes up. 80 % of the device may be used, its default.
    """
    usable = 0.8 * job.device_bytes
    peak = max(moment.nonmodel_bytes for moment in job.trace.moments)
    weights = sum(size.weight for size in job.sizes)
    margin = max(0.0, usable - peak - weights)
    on_device = min(1.0, margin / (_PATRICKSTAR_STATES * job.parameters))
    moved = _replay(job, lambda moment: usable - moment.nonmodel_bytes - margin, _farthest, write_back=True)
    return moved + int((1 - on_device) * 2 * weights)


def lru(job: Job) -> int:
    """The device caches weights by least recent use and drops them clean; the host updates, so all come up anew."""
    moved = _replay(job, lambda moment: job.device_bytes - moment.nonmodel_bytes, _least_recent, write_back=False)
    return moved + sum(job.sizes[moment.chunk].gradient for moment in job.trace.moments if moment.backward)


def _replay(job: Job, room: Callable[[Moment], float], choose: Choice, write_back: bool) -> int:
    """Bytes of weights that one step moves; with ``write_back`` in an endless run, else from an empty device."""
    order = [moment.chunk for moment in job.trace.moments]
    resident: set[int] = set()
    last_use: dict[int, int] = {}
    moved = 0
    for _ in range(3 if write_back else 1):  # the third step begins as it ends
        moved = 0
        for time, moment in enumerate(job.trace.moments):
            moved += 0 if moment.chunk in resident else job.sizes[moment.chunk].weight
            resident.add(moment.chunk)
            last_use[moment.chunk] = time
            while sum(job.sizes[chunk].weight for chunk in resident) > room(moment) and len(resident) > 1:
                victim = choose(resident - {moment.chunk}, time, order, last_use)
                resident.remove(victim)
                moved += job.sizes[victim].weight if write_back else 0
    return moved


def _farthest(candidates: set[int], time: int, order: list[int], last_use: dict[int, int]) -> int:
    following = order[time + 1 :] + order[: time + 1]
    return max(candidates, key=lambda chunk: (following.index(chunk), chunk))


def _least_recent(candidates: set[int], time: int, order: list[int], last_use: dict[int, int]) -> int:
    return min(candidates, key=lambda chunk: (last_use[chunk], chunk))
