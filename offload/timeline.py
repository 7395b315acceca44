"""How long a planned step takes: when copies run beside the computation, and how long it has to wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.device import Rates
from offload.plan import Plan
from offload.sizes import ChunkBytes

LATENCY_S = 2e-5
"""Of starting a copy: what one costs beyond its bytes."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step.

    Attributes:
        computation: as the plan's trace has it.
        uploads, downloads: all copies of that kind, one after the other.
        exposed: how long the computation waits for copies.
    """

    computation: float
    uploads: float
    downloads: float
    exposed: float


def predict_times(plan: Plan, sizes: Sequence[ChunkBytes], rates: Rates) -> StepTimes:
    """Plays a planned step: an upload starts ``prefetch_depth`` uses ahead, a gradient has two landings.

    The host's update is taken to be done in time.
    """
    moments = plan.trace.moments
    needed = plan.fetches()
    clock = upload_end = download_end = uploads = downloads = exposed = 0.0
    ready: dict[int, float] = {}
    landings = [0.0, 0.0]
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
        if moment.backward and moment.chunk not in plan.owned:
            seconds = LATENCY_S + sizes[moment.chunk].gradient / rates.download
            downloads += seconds
            begin = max(clock, landings[0])
            exposed += begin - clock
            clock = begin
            download_end = max(download_end, clock) + seconds
            landings = [landings[1], download_end]
    # The norm of the gradients waits for the last of them.
    exposed += max(0.0, download_end - clock)
    return StepTimes(sum(moment.seconds for moment in moments), uploads, downloads, exposed)
