"""Uneven cuts: layers over pipeline stages, tokens over slices, rows over unequal devices. Pure functions.

The engine has neither pipelines nor unequal ranks, so nothing calls these in training: they price what it would gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from m6.errors import UserError


def partition_layers(
    times: Sequence[float], memories: Sequence[float], caps: Sequence[float]
) -> tuple[list[int], float]:
    """Contiguous stages with the least time of the slowest, each within its memory: BaPipe (arXiv 2012.12544).

    Args:
        times: seconds of every layer.
        memories: bytes of every layer.
        caps: bytes that each stage may hold; as many as there are stages.

    Returns:
        The first layer of every stage, and the seconds of the slowest stage.

    Raises:
        UserError: there are fewer layers than stages, or no partition fits.
    """
    layers, stages = len(times), len(caps)
    if not 1 <= stages <= layers:
        raise UserError(f"{stages} stages of {layers} layers: expected at least one layer a stage")
    time_sums, memory_sums = _prefix_sums(times), _prefix_sums(memories)
    # best[s][l]: the slowest of the first s stages when they hold the first l layers.
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
    """Of the sum of ``times``, the share of the slowest stage in the best contiguous partition without memory caps.

    Bisection over the bound of a stage: filling stages one after the other uses the fewest for any bound.
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
    """Slices of one causal sequence that pass a pipeline fastest: TeraPipe (arXiv 2102.07988), section 3.3.

    A pipeline of K stages takes sum_i t_i + (K - 1) max_i t_i. For each bound on the longest slice the least sum is
    found by dynamic programming over prefixes. Bidirectional prefixes (M6's pictures and sources) cannot be cut.

    Args:
        length: tokens, a multiple of ``grain``.
        stages: K.
        seconds: of one stage for a slice, from its length and the number of tokens before it.

    Returns:
        The lengths of the slices, and the seconds of the pipeline.
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
            break
        total, slices = _least_sum(places, table, bound)
        cost = total + (stages - 1) * bound
        if cost < best:
            best, best_slices = cost, [size * grain for size in slices]
    return best_slices, best


def delayed_step_s(micro_batch_s: float, accumulation: int, stages: int) -> tuple[float, float]:
    """Seconds of a step of 1F1B with a flush, and of the schedule that applies gradients one step late.

    PipeDream-2BW (arXiv 2006.09503), section 3.1: without a flush no stage waits, at the price of a second copy of
    the weights and of W(t+1) = W(t) - lr grad(W(t-1)).

    Args:
        micro_batch_s: of the slowest stage, forward and backward.
    """
    return micro_batch_s * (accumulation + stages - 1), micro_batch_s * accumulation


def share_rows(rows: int, speeds: Sequence[float], capacities: Sequence[int]) -> list[int]:
    """Rows for each of unequal devices so that the slowest ends soonest: Whale (arXiv 2011.09208), algorithm 1.

    Row by row to the device that would end first, which is optimal where a row costs every device a constant; a full
    device takes no more. Gradients must then be weighted by rows.

    Args:
        rows: of the global batch.
        speeds: rows a second of each device.
        capacities: rows that fit the memory of each.

    Raises:
        UserError: the devices cannot hold so many.
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
