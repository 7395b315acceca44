"""Predicts the time of a planned step: copies overlap with the computation or stall it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.devices.device import Rates
from offload.memory.layout import ChunkBytes
from offload.plan.placement import PlacementPlan

LATENCY_S = 2e-5
"""Seconds to start a copy, in addition to the time of its bytes."""


@dataclass(frozen=True)
class StepTimes:
    """The times of a step in seconds.

    Attributes:
        computation: the computation's time in the plan's trace.
        uploads, downloads: the time of all copies in that direction.
        exposed: how long the computation waits for copies.
    """

    computation: float
    uploads: float
    downloads: float
    exposed: float


def predict_times(plan: PlacementPlan, sizes: Sequence[ChunkBytes], rates: Rates) -> StepTimes:
    """Simulates a planned step.

    An upload starts ``prefetch_depth`` uses ahead. A gradient needs one of two staging buffers. The host's update is
    assumed to be done in time.
    """
    moments = plan.trace.moments
    needed = plan.fetches()
    clock = upload_end = download_end = uploads = downloads = exposed = 0.0
    ready: dict[int, float] = {}
    staging_free = [0.0, 0.0]
    issued = -1
    for number, moment in enumerate(moments):
        for ahead in range(issued + 1, min(number + plan.prefetch_depth, len(moments) - 1) + 1):
            issued = ahead
            if needed[ahead]:
                seconds = LATENCY_S + sizes[moments[ahead].chunk].weight / rates.upload
                uploads += seconds
                upload_end = max(upload_end, clock) + seconds
                ready[ahead] = upload_end
        start = max(clock, ready.get(number, 0.0))
        exposed += start - clock
        clock = start + moment.seconds
        if moment.sends_gradient and moment.chunk not in plan.owned:
            seconds = LATENCY_S + sizes[moment.chunk].gradient / rates.download
            downloads += seconds
            begin = max(clock, staging_free[0])  # the two buffers are used in turn, so the older download ends first
            exposed += begin - clock
            clock = begin
            download_end = max(download_end, clock) + seconds
            staging_free = [staging_free[1], download_end]
    # The norm of the gradients waits for the last of them.
    exposed += max(0.0, download_end - clock)
    return StepTimes(sum(moment.seconds for moment in moments), uploads, downloads, exposed)
