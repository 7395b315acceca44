"""Slices of the rows of a micro-batch (token-level pipelining): where to cut, and the cut micro-batches.

The slices pass through a pipeline one after the other. A run sets their number, or a model of their time chooses it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from m6.architecture.settings import ModelSettings
from m6.architecture.special_tokens import IGNORED_LABEL, IMAGE
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.parameters import num_parameters
from m6.model.slices import nearest_valid_cuts, valid_cuts

# Odd, also its lower half, like the stride of the layers (m6/model/blocks.py).
_SEED_STRIDE = 0xD1B54A32D192ED03
_MOST = 16  # slices considered by "auto"
# FLOPs of a device per byte of its memory bandwidth, in 16 bits: V100 140, A100 150, H100 300.
_FLOPS_PER_BYTE = 150
_BYTES_OF_WEIGHT = 2


@dataclass(frozen=True)
class Slice:
    """The tokens ``[begin, end)`` of all rows of a micro-batch.

    Attributes:
        batch: the tensors of the slice, see ``cut``.
        number: of the micro-batch in the step.
        begin: the number of tokens of each row before the slice.
        seed: for dropout.
    """

    batch: MicroBatch
    number: int
    begin: int
    seed: int


def slices_of(batch: MicroBatch, number: int, seed: int, cuts: list[int], model: ModelSettings) -> list[Slice]:
    """Returns the slices of a micro-batch in the order of its tokens.

    Args:
        batch: on the CPU.
        number: of the micro-batch in the step.
        seed: of the micro-batch. The first slice keeps it.
        cuts: increasing positions, see ``valid_cuts``.
    """
    bounds = [0, *cuts, batch.input_ids.shape[1]]
    return [
        Slice(cut(batch, begin, end, model), number, begin, (seed + begin * _SEED_STRIDE) % 2**63)
        for begin, end in itertools.pairwise(bounds)
    ]


def cut(batch: MicroBatch, begin: int, end: int, model: ModelSettings) -> MicroBatch:
    """Cuts the tokens ``[begin, end)`` of all rows out of a micro-batch.

    Returns:
        ``sample_ids`` of all tokens up to ``end``: [B, end]. ``labels`` and the ids of targets: [B, end - begin + 1],
        or one less at the end of the rows. A token is predicted from the token before it, so the last token of a slice
        predicts the first token behind the slice. The other tensors have the slice's tokens and images. Counts are
        still those of the whole micro-batch.
    """
    own, labelled = slice(begin, end), slice(begin, end + 1)
    labels = batch.labels[:, labelled]
    if begin > 0:  # the previous slice predicts the first label
        labels = labels.clone()
        labels[:, 0] = IGNORED_LABEL
    return replace(
        batch,
        input_ids=batch.input_ids[:, own],
        token_type_ids=batch.token_type_ids[:, own],
        position_ids=batch.position_ids[:, own],
        sample_ids=batch.sample_ids[:, :end],
        labels=labels,
        objective_ids=batch.objective_ids[:, labelled],
        data_source_ids=batch.data_source_ids[:, labelled],
        pixel_values=_pictures(batch, begin, end, model),
    )


def _pictures(batch: MicroBatch, begin: int, end: int, model: ModelSettings) -> Tensor:
    """Returns the images with placeholders in the slice. No legal cut is inside an image."""
    is_patch = (batch.input_ids == model.image_token_id) & (batch.token_type_ids == IMAGE)
    places = torch.nonzero(is_patch)[:, 1][:: model.num_patches]
    return batch.pixel_values[(places >= begin) & (places < end)]


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
        places: increasing places of possible cuts, see ``valid_cuts``. The time grows with the fourth power of their
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
        nearest = nearest_valid_cuts(valid_cuts(batch.token_type_ids, batch.sample_ids), length, self.most)
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
