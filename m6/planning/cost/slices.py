"""Into which slices the rows of a micro-batch are cut: as many as asked for, or as the model of their time says."""

from __future__ import annotations

from collections.abc import Callable

from m6.architecture.settings import ModelSettings
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.counting import num_parameters
from m6.model.slices import legal_cuts, nearest_cuts
from m6.planning.cost.partition import slice_tokens

_MOST = 16  # slices that "auto" considers
# What a device computes while its memory moves a byte, in 16 bits: V100 140, A100 150, H100 300 FLOPs.
_FLOPS_PER_BYTE = 150
_BYTES_OF_WEIGHT = 2


class SliceChoice:
    """Chooses the cuts of micro-batches; it is a function of the configuration and the micro-batch.

    Args:
        micro_batches: of a rank in a step.

    Attributes:
        most: slices that a micro-batch may have.
    """

    def __init__(self, config: RunConfig, micro_batches: int) -> None:
        assert config.pipeline is not None
        assert config.pipeline.slices is not None
        self._config, self._micro_batches = config, micro_batches
        self._stages = config.pipeline.num_ranks
        self._is_auto = config.pipeline.slices == "auto"
        self.most = _MOST if config.pipeline.slices == "auto" else config.pipeline.slices

    def cuts(self, batch: MicroBatch) -> list[int]:
        """The cuts of a micro-batch: the legal places nearest to those of equal slices, or the best of them."""
        rows, length = batch.input_ids.shape
        nearest = nearest_cuts(legal_cuts(batch.token_type_ids, batch.sample_ids), length, self.most)
        if not self._is_auto:
            return nearest
        work = slice_work(self._config.model, rows, self._config.m6.training.ep_size)
        cuts, _ = slice_tokens(length, nearest, self._stages, self._micro_batches, work)
        return cuts


def slice_work(model: ModelSettings, rows: int, ep_size: int) -> Callable[[int, int], float]:
    """How long a stage computes a slice, in FLOPs of all layers: (tokens of the slice, tokens before it) -> FLOPs.

    A slice takes at least as long as the memory moves the weights of the layers, and their gradients.

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
