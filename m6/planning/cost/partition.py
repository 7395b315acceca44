"""Uneven partitions: tokens over slices of a row, rows over unequal devices. Pure functions.

The engine has neither: the planner uses these functions to price what they would gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from m6.errors import UserError


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
