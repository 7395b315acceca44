"""A formula for the bytes saved by autograd for the backward pass, of one micro-batch and on a rank of a pipeline.

The formula follows the CPU kernels of PyTorch 2.13. Tests compare it with the count of :class:`SavedTensors`. Names:

    tokens     rows * sequence_length, padding included         real    tokens without padding
    vectors    elements of [tokens, hidden_size]                choices real * experts of a token
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from m6.config.pipeline import PipelineSettings
from m6.config.run import RunConfig
from m6.model.attention import LONGEST_PRODUCTS
from m6.model.patch_encoders import build_patch_encoder
from m6.planning.cost.layout import ParallelLayout
from m6.training.sizes import FP32, BatchShape, Precision, SavedTensors
from moe.config import MoEConfig

_INT64 = 8
_PATCH_ENCODERS: dict[tuple[str | int, ...], int] = {}  # bytes, keyed by everything they depend on


class Activations:
    """Bytes by part of the model, for micro-batches of the shape ``batch``.

    Under expert parallelism a rank is assumed to receive as many tokens as it sends.

    Args:
        vocabulary_parts: ranks over which the rows of the head's matrix are divided.
        sequence_parallel: see ``ParallelLayout``.
    """

    def __init__(
        self, config: RunConfig, batch: BatchShape, vocabulary_parts: int = 1, sequence_parallel: bool = False
    ) -> None:
        self.sequence_parallel = sequence_parallel
        self.config, self.model, self.batch = config, config.model, batch
        self._vocabulary = math.ceil(config.model.vocab_size / vocabulary_parts)
        self.precision = Precision.of(config)
        self.tokens = batch.rows * batch.sequence_length
        self.vectors = self.tokens * self.model.hidden_size

    @functools.cached_property
    def moe(self) -> MoEConfig:
        """The settings of the sparse layers."""
        return self.model.moe_config()

    def total(self) -> int:
        """Bytes at the end of the forward pass. With activation checkpointing: bytes during the recomputation of a
        block in the backward pass, if these are more."""
        kept = self.embeddings() + self.norm() + self.head() + self.kept_by_blocks()
        if not self.config.m6.training.activation_checkpointing:
            return kept
        return kept + self.masks() + self.recomputation()

    def masks(self) -> int:
        """Bytes of the masks, the inputs of every recomputed block."""
        return self.tokens * (self.batch.sequence_length + 1)

    def kept_by_blocks(self) -> int:
        """Bytes of all blocks after the forward pass."""
        if self.config.m6.training.activation_checkpointing:
            return self.model.num_layers * self.block_input()
        return sum(self.blocks())

    def replicated(self) -> int:
        """The part of ``kept_by_blocks`` without a split by tensor parallelism: with checkpointing the inputs of
        blocks, otherwise five vectors of each block (arXiv 2205.05198, equation 2)."""
        if self.sequence_parallel:
            return self._whole_tokens_of_experts()
        vectors = 1 if self.config.m6.training.activation_checkpointing else 5
        return min(self.kept_by_blocks(), vectors * self.model.num_layers * self.block_input())

    def loss_backward(self, at_once: int = 1) -> int:
        """Bytes on top of ``at_once`` times ``total`` when the backward pass begins: gradients of log-probabilities and
        of logits."""
        gradients = 2 * self.batch.targets * self._vocabulary * FP32
        return max(0, gradients - at_once * self.recomputation())

    def recomputation(self) -> int:
        """Bytes by which the largest recomputed block exceeds the head. The head's activations are freed before."""
        if not self.config.m6.training.activation_checkpointing:
            return 0
        return max(0, max(self.blocks()) - self.block_input() - self.head())

    def blocks(self) -> list[int]:
        """Bytes of each block without checkpointing, by layer."""
        is_sparse = [self.model.is_moe_layer(layer) for layer in range(self.model.num_layers)]
        each = {sparse: self.block(sparse) for sparse in set(is_sparse)}
        return [each[sparse] for sparse in is_sparse]

    def block_input(self) -> int:
        """Bytes of the residual stream."""
        return self.vectors * self.precision.residual

    def embeddings(self) -> int:
        """Ids of tokens, positions and segments; the patch encoder and the positions of its patches; dropout."""
        places = 3 * _INT64 * (self.tokens + self.batch.pictures * self.model.num_patches)
        dropout = self.vectors * self.precision.residual if self.model.hidden_dropout else 0
        return places + self.patch_encoder() + dropout

    def patch_encoder(self) -> int:
        """Measured once: two of the three patch encoders are third-party networks without a formula."""
        if not self.batch.pictures:
            return 0
        model = self.model
        sizes = (model.patch_size, model.hidden_size, model.image_size, self.batch.pictures)
        key = (model.patch_encoder, *sizes, self.precision.compute, self.precision.weights)
        if key not in _PATCH_ENCODERS:
            _PATCH_ENCODERS[key] = self._measure_patch_encoder()
        return _PATCH_ENCODERS[key]

    def _measure_patch_encoder(self) -> int:
        copied = self.precision.compute != self.precision.weights
        with torch.device("meta"):
            encoder = build_patch_encoder(self.model)
            encoder.to(torch.float32 if self.precision.compute == FP32 else torch.bfloat16)
            pictures = torch.empty(self.batch.pictures, 3, self.model.image_size, self.model.image_size)
        # The 16-bit copies of weights count, but not in the first layer, whose input has no gradient.
        with SavedTensors(nn.Identity() if copied else encoder) as saved:
            encoder(pictures)
        return saved.bytes

    def block(self, sparse: bool) -> int:
        """One transformer block, with experts where ``sparse``."""
        dropout = 0
        if self.model.hidden_dropout:
            # On the CPU dropout keeps factors in the type of its input, not bits.
            output = self.precision.residual if sparse else self.precision.compute
            dropout = self.vectors * (self.precision.compute + output)
        return 2 * self.norm() + self.attention() + (self.experts() if sparse else self.dense_ffn()) + dropout

    def norm(self) -> int:
        """A layer norm: its input, and the mean and deviation of each token."""
        return (self.vectors + 2 * self.tokens) * self.precision.residual

    def attention(self) -> int:
        """Attention with its projections."""
        compute, heads, width = self.precision.compute, self.model.num_attention_heads, self.model.hidden_size
        kept = self.vectors * compute  # the result
        kept += self.vectors * compute + self.precision.weight_copies(4 * width**2)  # the input
        scores = self.tokens * self.batch.sequence_length
        if compute < FP32 and self.batch.sequence_length <= LONGEST_PRODUCTS:
            # Products in 16 bits: queries, keys, values; probabilities, dropout factors, their product; the mask. On a
            # GPU such short rows take less.
            written = (3 if self.model.attention_dropout else 1) * heads * scores
            return kept + (3 * self.vectors + written) * compute + scores
        if self.model.attention_dropout:
            # Dropout needs the kernel that writes the scores, which works in fp32: queries, keys, values;
            # probabilities, dropout factors, their product.
            return kept + 3 * (self.vectors + heads * scores) * FP32
        # The flash kernel keeps no scores, but an additive mask of their size, and the logsumexp of each token.
        return kept + (3 * self.vectors + scores) * compute + heads * self.tokens * FP32

    def dense_ffn(self) -> int:
        """The input, and the inner activations before and after GELU."""
        width, inner = self.model.hidden_size, self.model.ffn_hidden_size
        elements = self.vectors + 2 * self.tokens * inner
        return elements * self.precision.compute + self.precision.weight_copies(2 * width * inner)

    def experts(self) -> int:
        """Router, dispatch and expert networks: inputs where they are not the router's; inner activations; outputs."""
        moe, width, inner = self.moe, self.model.hidden_size, self.model.ffn_hidden_size
        real, rows, precision = self.batch.real, self.most_rows(), self.precision
        # For each row its choice, token and gate, and its position by token; for each token its first row.
        dispatch = rows * (3 * _INT64 + FP32) + real * _INT64
        inner_inputs = inner * (2 if moe.activation == "swiglu" else 1)
        kept = inner_inputs if moe.recompute_activation else inner_inputs + inner + width
        networks = rows * kept * precision.compute + (rows * inner if moe.expert_dropout else 0)
        copied_tokens = real * width * precision.compute if precision.compute != precision.residual else 0
        networks += copied_tokens  # of weights no copy is kept
        if moe.num_shared_experts:
            shared, gate = moe.num_shared_experts, int(moe.shared_expert_gate)
            elements = shared * 2 * inner_inputs + gate * (width + 1)  # the gate, and the output that it scales
            networks += copied_tokens + real * elements * precision.compute
            networks += precision.weight_copies(width * (shared * (inner_inputs + inner) + gate))
        return self.router() + dispatch + networks + self.combined(width)

    def rows(self) -> int:
        """(token, expert) pairs that experts compute, in the mean. Padding is not routed."""
        return self._rows(0)

    def most_rows(self) -> int:
        """An upper estimate of ``rows``: for randomly rounded capacities, six standard deviations above the mean."""
        return self._rows(6)

    def _rows(self, deviations: float) -> int:
        moe, real = self.moe, self.batch.real
        choices = real * moe.experts_per_token
        capacity = moe.mean_capacity(real, training=True)
        if capacity is None:
            return choices
        # Each expert rounds the fraction of the capacity up or down at random.
        share = capacity % 1
        spread = math.sqrt(moe.num_experts * share * (1 - share))
        return min(choices, round(capacity * moe.num_experts + deviations * spread))

    def router(self) -> int:
        """The router's input, scores and choices."""
        moe, real, width = self.moe, self.batch.real, self.model.hidden_size
        # The tokens in the type of the residual stream, and the factors of the jitter.
        router = real * width * (self.precision.residual + (FP32 if moe.router_jitter else 0))
        # Scores and chosen experts; for the z loss exponentials, their sums, and the logarithms of these.
        router += real * moe.num_experts * FP32 + real * moe.experts_per_token * _INT64
        if moe.z_loss_weight:
            router += real * (moe.num_experts + 2 * moe.num_prototypes) * FP32
        if moe.balance_scope == "sequence" and moe.aux_loss_weight:
            router += real * moe.num_experts * FP32  # the shares of each token's sequence
        return router

    def _whole_tokens_of_experts(self) -> int:
        """Bytes kept by the layers of experts for all tokens, though other layers keep parts of them."""
        if self.config.m6.training.activation_checkpointing or self.model.moe is None:
            return 0
        each = self.router() + self.combined(self.model.hidden_size)
        return min(self.kept_by_blocks(), self.model.num_moe_layers * each)

    def combined(self, output_size: int) -> int:
        """Positions and results of the real tokens, before the scatter into the padded batch."""
        return self.batch.real * (_INT64 + output_size * self.precision.residual)

    def head(self) -> int:
        """At labelled positions only: hidden states; log-probabilities and losses in fp32; positions, labels."""
        width, vocab_size = self.model.hidden_size, self._vocabulary
        each = width * self.precision.compute + vocab_size * FP32 + 3 * _INT64 + FP32
        return self.batch.targets * each + self.precision.weight_copies(vocab_size * width)


def with_training(config: RunConfig, layout: ParallelLayout) -> RunConfig:
    """``config`` with the values of ``layout`` for activations. They are not validated, to price any layout."""
    update = {"ep_size": layout.ep_size, "activation_checkpointing": layout.checkpointing}
    training = config.m6.training.model_copy(update=update)
    return replace(config, m6=config.m6.model_copy(update={"training": training}))


def holds_copy_of_table(settings: PipelineSettings, place: int) -> bool:
    """Whether a rank has a copy of the token embedding, for the logits of the last stage."""
    last = settings.num_ranks * settings.stages_per_rank() - 1
    stages = settings.stages_of(place)
    return last in stages and 0 not in stages


def old_versions(ahead: int, micro_batches: int) -> int:
    """The most copies of old weights of a rank in a pipeline without a flush.

    The last ``ahead`` micro-batches of a step end after the update, so they compute with a copy of the old weights.
    If the step has fewer than 2 * ``ahead`` micro-batches, the copy of the next step is made before they end.

    Args:
        ahead: micro-batches of a step in flight at its end.
        micro_batches: of a step.
    """
    if ahead == 0:
        return 0
    return 2 if 2 * ahead > micro_batches else 1


class PipelineActivations:
    """Counts the activations of any rank of any pipeline.

    A stage keeps the activations of its layers and its output for each micro-batch. PyTorch holds the output for the
    backward pass.

    Args:
        found: the activations of one micro-batch in the whole model.
        tp_size, outer_parts: see ``ParallelLayout``.
    """

    def __init__(self, found: Activations, tp_size: int, outer_parts: int) -> None:
        self._tp_size, self._outer_parts, self._num_layers = tp_size, outer_parts, found.model.num_layers
        self._checkpointing = found.config.m6.training.activation_checkpointing
        self._blocks, self._input = found.blocks(), found.block_input()
        kept = [self._input] * self._num_layers if self._checkpointing else self._blocks
        self._kept = [0, *itertools.accumulate(kept)]  # of the first layers
        whole, replicated = found.kept_by_blocks(), found.replicated()
        self._split = (replicated + (whole - replicated) / tp_size) / whole
        self._embeddings, self._norm, self._head = found.embeddings(), found.norm(), found.head()
        self._output = self._input / (tp_size if found.sequence_parallel else outer_parts)
        self._masks, self._loss_backward = found.masks(), found.loss_backward()

    def bytes(self, settings: PipelineSettings, place: int, stages: Sequence[range], micro_batches: int) -> int:
        """The most bytes of a rank at any time.

        Args:
            place: of the rank in its pipeline.
            stages: the layers of each of its stages.
            micro_batches: of a step.
        """
        from m6.planning.cost.schedules import filled_step, most_in_flight  # a run without a pipeline does not load it

        each = [self._stage(layers) for layers in stages]
        number = filled_step(settings, micro_batches)
        in_flight = most_in_flight(settings.schedule, settings.num_ranks, number, settings.stages_per_rank())
        kept = max(sum(map(int.__mul__, counts, each)) for counts in in_flight[place])
        return kept + self._once(stages)

    def between_steps(self, settings: PipelineSettings, place: int, stages: Sequence[range]) -> int:
        """Bytes of micro-batches of the next step in flight at the end of a step, in 1F1B without a flush."""
        return (settings.num_ranks - place - 1) * sum(map(self._stage, stages))

    def _stage(self, layers: range) -> int:
        """Bytes of a micro-batch in a stage."""
        is_last = layers.stop == self._num_layers
        ends = (self._embeddings if layers.start == 0 else 0) + (self._norm + self._head if is_last else 0)
        blocks = self._split * (self._kept[layers.stop] - self._kept[layers.start])
        return round(blocks + ends / self._outer_parts + (0 if is_last else self._output))

    def _once(self, stages: Sequence[range]) -> int:
        """Bytes needed once, whatever the number of micro-batches in flight."""
        has_head = any(layers.stop == self._num_layers for layers in stages)
        once = self._loss_backward // self._outer_parts if has_head else 0
        if self._checkpointing:
            largest = max(self._blocks[layer] for layers in stages for layer in layers) - self._input
            once += (self._masks + max(0, largest - (self._head if has_head else 0))) // self._tp_size
        return once
