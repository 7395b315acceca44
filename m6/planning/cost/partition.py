"""Uneven partitions: layers over pipeline stages, tokens over slices, rows over unequal devices. Pure functions.

The engine has neither pipelines nor unequal ranks: the planner uses these functions to price what they would gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from m6.errors import UserError


def partition_layers(
    times: Sequence[float], memories: Sequence[float], caps: Sequence[float]
) -> tuple[list[int], float]:
    """Contiguous stages that fit their memory and whose slowest stage is as fast as possible: BaPipe (2012.12544).

    Args:
        times: seconds of each layer.
        memories: bytes of each layer.
        caps: bytes that each stage may hold.

    Returns:
        The first layer of each stage, and the seconds of the slowest stage.

    Raises:
        UserError: there are fewer layers than stages, or no partition fits.
    """
    layers, stages = len(times), len(caps)
    if not 1 <= stages <= layers:
        raise UserError(f"{stages} stages of {layers} layers: expected at least one layer a stage")
    time_sums, memory_sums = _prefix_sums(times), _prefix_sums(memories)
    # best[s][l]: seconds of the slowest of the first s stages if these hold the first l layers.
    best = [[math.inf] * (layers + 1) for _ in range(stages + 1)]
    cut = [[0] * (layers + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, layers + 1):
            for begin in range(stage - 1, end):
                if memory_sums[end] - memory_sums[begin] > caps[stage - 1]:
                    continue
                slowest = max(best[stage - 1][begin], time_sums[end] - time_sums[begin])
                if slowest < best[stage][end]:
                    best[stage][end], cut[stage][end] = slowest, begin
    if best[stages][layers] == math.inf:
        raise UserError(f"no partition of {layers} layers into {stages} stages fits the memory")
    starts, end = [], layers
    for stage in range(stages, 0, -1):
        end = cut[stage][end]
        starts.append(end)
    return starts[::-1], best[stages][layers]


def balanced_share(times: Sequence[float], stages: int) -> float:
    """The slowest stage's share of the sum of ``times`` in the best contiguous partition without memory caps.

    Bisection over the seconds of a stage: for any bound, filling stages one after the other needs the fewest stages.
    """
    low, high = max(max(times), sum(times) / stages), float(sum(times))
    while high - low > 1e-9 * high:
        bound, used, filled = (low + high) / 2, 1, 0.0
        for seconds in times:
            used, filled = (used, filled + seconds) if filled + seconds <= bound else (used + 1, seconds)
        low, high = (low, bound) if used <= stages else (bound, high)
    return high / sum(times)


def slice_tokens(
    length: int, stages: int, seconds: Callable[[int, int], float], grain: int = 8
) -> tuple[list[int], float]:
    """The slices of one causal sequence that pass a pipeline fastest: TeraPipe (arXiv 2102.07988), section 3.3.

    Slices of t_i seconds take sum_i t_i + (K - 1) max_i t_i on K stages. For each bound on max_i t_i dynamic
    programming over prefixes finds the least sum. Bidirectional prefixes (M6's pictures and source texts) cannot be
    sliced.

    Args:
        length: tokens, a multiple of ``grain``.
        stages: K.
        seconds: (tokens of a slice, tokens before it) -> seconds of one stage.
        grain: tokens; the length of every slice is a multiple of it.

    Returns:
        The lengths of the slices in tokens, and the seconds of the pipeline.

    Raises:
        UserError: ``length`` is not a positive multiple of ``grain``.
    """
    if length % grain or length <= 0:
        raise UserError(f"{length} tokens: expected a positive multiple of {grain}")
    places = length // grain
    table = {
        (begin, end): seconds((end - begin) * grain, begin * grain)
        for begin in range(places)
        for end in range(begin + 1, places + 1)
    }
    best, best_slices = math.inf, [length]
    for bound in sorted(set(table.values())):
        if (stages - 1) * bound >= best:
            break  # larger bounds cannot be better
        total, slices = _least_sum(places, table, bound)
        cost = total + (stages - 1) * bound
        if cost < best:
            best, best_slices = cost, [size * grain for size in slices]
    return best_slices, best


def delayed_step_s(micro_batch_s: float, accumulation: int, stages: int) -> tuple[float, float]:
    """Seconds of a step of 1F1B with a pipeline flush, and of a schedule that applies gradients one step late.

    PipeDream-2BW (arXiv 2006.09503), section 3.1: without a flush no stage waits. The price is a second copy of the
    weights and the update W(t+1) = W(t) - lr grad(W(t-1)).

    Args:
        micro_batch_s: seconds of a micro-batch, forward and backward, in the slowest stage.
        accumulation: micro-batches of a step.
        stages: pipeline stages.
    """
    return micro_batch_s * (accumulation + stages - 1), micro_batch_s * accumulation


def share_rows(rows: int, speeds: Sequence[float], capacities: Sequence[int]) -> list[int]:
    """Rows for each of several unequal devices such that the last one ends early: Whale (2011.09208), algorithm 1.

    Each row goes to the device that would end first with it, if its memory holds another row. This is optimal if a row
    costs constant time on each device. Gradients must then be weighted by rows.

    Args:
        rows: of the global batch.
        speeds: rows a second of each device.
        capacities: rows that fit the memory of each device.

    Raises:
        UserError: the devices cannot hold ``rows`` rows.
    """
    if sum(capacities) < rows:
        raise UserError(f"{rows} rows do not fit devices that hold {sum(capacities)}")
    shares = [0] * len(speeds)
    for _ in range(rows):
        open_devices = [d for d in range(len(speeds)) if shares[d] < capacities[d]]
        first = min(open_devices, key=lambda device: (shares[device] + 1) / speeds[device])
        shares[first] += 1
    return shares


def _least_sum(places: int, table: dict[tuple[int, int], float], bound: float) -> tuple[float, list[int]]:
    """The least sum of slices that take at most ``bound`` seconds each, and their lengths in units of the grain."""
    sums, cut = [0.0] + [math.inf] * places, [0] * (places + 1)
    for end in range(1, places + 1):
        for begin in range(end):
            if table[begin, end] <= bound and sums[begin] + table[begin, end] < sums[end]:
                sums[end], cut[end] = sums[begin] + table[begin, end], begin
    slices, end = [], places
    while end > 0 and sums[places] < math.inf:
        slices.append(end - cut[end])
        end = cut[end]
    return sums[places], slices[::-1]


def _prefix_sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
