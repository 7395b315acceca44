"""Into which slices the rows of a micro-batch are cut: as many as asked for, or as the model of their time says."""

from __future__ import annotations

from collections.abc import Callable

from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
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
        cuts, _ = slice_tokens(length, nearest, self._stages, self._micro_batches, slice_work(self._config, rows))
        return cuts


def slice_work(config: RunConfig, rows: int) -> Callable[[int, int], float]:
    """How long a stage computes a slice, in FLOPs of all layers: (tokens of the slice, tokens before it) -> FLOPs.

    A slice takes at least as long as the memory moves the weights of the layers, and their gradients.

    Args:
        rows: of the micro-batch.
    """
    model, moe = config.model, config.model.moe
    width, layers = model.hidden_size, model.num_layers
    used = moved = 4 * width**2 * layers  # weights of attention, by which each token is multiplied
    dense = 2 * width * model.ffn_hidden_size
    sparse = sum(map(model.is_moe_layer, range(layers)))
    used, moved = used + dense * (layers - sparse), moved + dense * (layers - sparse)
    if moe is not None:
        settings = model.moe_config()
        expert = dense * (3 if settings.activation == "swiglu" else 2) // 2
        chosen = settings.num_prototypes * settings.top_k + settings.num_shared_experts
        held = settings.num_experts // config.m6.training.ep_size + settings.num_shared_experts
        used, moved = used + sparse * expert * chosen, moved + sparse * expert * held
    # Both passes read the weights, and the backward pass reads and writes the gradients: 4 times in the time of 3
    # forward passes.
    least = moved * _BYTES_OF_WEIGHT * _FLOPS_PER_BYTE * 4 / 3

    def work(size: int, before: int) -> float:
        return max(rows * size * (2.0 * used + 4.0 * width * layers * (before + size)), least)

    return work
