"""Slices of the rows of a micro-batch (token-level pipelining).

A run sets the number of slices, or a model of their time chooses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from m6.architecture.settings import ModelSettings
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.parameters import num_parameters
from m6.model.slices import legal_cuts, nearest_cuts


def slice_tokens(
    length: int, places: Sequence[int], stages: float, rows: int, seconds: Callable[[int, int], float]
) -> tuple[list[int], float]:
    """The fastest cuts of rows in a pipeline: TeraPipe (arXiv 2102.07988), section 3.3, for M rows.

    M rows with slices of t_i seconds take M sum_i t_i + (K - 1) max_i t_i on K stages: each stage computes all slices,
    and the longest slice passes K - 1 further stages. TeraPipe's objective has M = 1. For more rows it yields too many
    slices if each slice has a fixed cost. For each bound on max_i t_i dynamic programming over prefixes finds the least
    sum.

    Args:
        length: tokens of a row.
        places: increasing places of possible cuts, see ``legal_cuts``. The time grows with the fourth power of their
            number.
        stages: K; stages faster than the stage of ``seconds`` count in part.
        rows: M, one after the other.
        seconds: (tokens of a slice, tokens before it) -> seconds of one stage.

    Returns:
        The cuts, and the seconds of the pipeline.
    """
    bounds = [0, *places, length]
    table = {
        (begin, end): seconds(bounds[end] - bounds[begin], bounds[begin])
        for begin in range(len(bounds) - 1)
        for end in range(begin + 1, len(bounds))
    }
    best, best_cuts = math.inf, list[int]()
    for bound in sorted(set(table.values())):
        if (stages - 1 + rows) * bound >= best:
            break  # larger bounds cannot be better: the sum has a slice of this time
        total, cuts = _least_sum(len(bounds) - 1, table, bound)
        cost = rows * total + (stages - 1) * bound
        if cost < best:
            best, best_cuts = cost, [bounds[cut] for cut in cuts]
    return best_cuts, best


def _least_sum(last: int, table: dict[tuple[int, int], float], bound: float) -> tuple[float, list[int]]:
    """The least sum of slices from place 0 to ``last`` with at most ``bound`` seconds each, and their cuts."""
    sums, cut = [0.0] + [math.inf] * last, [0] * (last + 1)
    for end in range(1, last + 1):
        for begin in range(end):
            if table[begin, end] <= bound and sums[begin] + table[begin, end] < sums[end]:
                sums[end], cut[end] = sums[begin] + table[begin, end], begin
    cuts, end = list[int](), last
    while end > 0 and sums[last] < math.inf:
        end = cut[end]
        cuts.append(end)
    return sums[last], cuts[-2::-1]


_MOST = 16  # slices considered by "auto"
# FLOPs of a device per byte of its memory bandwidth, in 16 bits: V100 140, A100 150, H100 300.
_FLOPS_PER_BYTE = 150
_BYTES_OF_WEIGHT = 2


class SliceChoice:
    """Chooses the cuts of micro-batches. The choice is a function of the configuration and the micro-batch.

    Args:
        micro_batches: of a rank in a step.

    Attributes:
        most: the largest number of slices of a micro-batch.
    """

    def __init__(self, config: RunConfig, micro_batches: int) -> None:
        assert config.pipeline is not None
        assert config.pipeline.slices is not None
        self._config, self._micro_batches = config, micro_batches
        self._stages = config.pipeline.num_ranks
        self._is_auto = config.pipeline.slices == "auto"
        self.most = _MOST if config.pipeline.slices == "auto" else config.pipeline.slices

    def cuts(self, batch: MicroBatch) -> list[int]:
        """The cuts of a micro-batch: the legal places nearest to equal slices, or with "auto" the best of these."""
        rows, length = batch.input_ids.shape
        nearest = nearest_cuts(legal_cuts(batch.token_type_ids, batch.sample_ids), length, self.most)
        if not self._is_auto:
            return nearest
        work = slice_work(self._config.model, rows, self._config.m6.training.ep_size)
        cuts, _ = slice_tokens(length, nearest, self._stages, self._micro_batches, work)
        return cuts


def slice_work(model: ModelSettings, rows: int, ep_size: int) -> Callable[[int, int], float]:
    """The time of a slice in a stage, in FLOPs of all layers: (tokens of the slice, tokens before it) -> FLOPs.

    A slice takes at least the time of moving the weights of the layers and their gradients.

    Args:
        rows: of the micro-batch.
        ep_size: ranks that share one set of experts.
    """
    counts = num_parameters(model)
    held = sum(counts[part] for part in ("attention", "ffn", "experts", "router"))
    used = held - (counts["total"] - counts["active_per_token"])
    moved = held - counts["experts"] * (1 - 1 / ep_size)
    # Both passes read the weights, and the backward pass reads and writes the gradients: 4 times in the time of 3
    # forward passes.
    least = moved * _BYTES_OF_WEIGHT * _FLOPS_PER_BYTE * 4 / 3
    of_score = 4.0 * model.hidden_size * model.num_layers

    def work(size: int, before: int) -> float:
        return max(rows * size * (2.0 * used + of_score * (before + size)), least)

    return work
