"""The bytes that autograd keeps for the backward pass of one micro-batch, as a formula.

It follows PyTorch 2.13's CPU kernels; ``m6.planning.measure`` measures the truth. The long names of its symbols:

    tokens     rows * sequence_length, padding included         real    those that are no padding
    vectors    tokens * hidden_size elements                    choices real * experts of a token
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn

from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.patch_encoders import build_patch_encoder
from m6.planning.measure import SavedTensors
from moe.config import MoEConfig

FP32 = 4
_INT64 = 8


@dataclass(frozen=True)
class BatchShape:
    """What of a micro-batch decides how much memory it takes.

    Attributes:
        samples: of the micro-batch; several may share a row.
    """

    samples: int
    rows: int
    sequence_length: int
    real: int
    """tokens that are not padding"""
    targets: int
    pictures: int

    @classmethod
    def of(cls, *batches: MicroBatch) -> BatchShape:
        """The shape that holds each of ``batches``."""
        shapes = [
            (b.num_samples, *b.input_ids.shape, b.num_tokens, b.num_target_tokens, len(b.pixel_values)) for b in batches
        ]
        return cls(*(max(sizes) for sizes in zip(*shapes, strict=True)))


@dataclass(frozen=True)
class Precision:
    """Bytes of an element: of the weights, of what matrices multiply, of the residual stream."""

    weights: int
    compute: int
    residual: int

    @classmethod
    def of(cls, config: RunConfig) -> Precision:
        if config.deepspeed.precision != "fp32":
            return cls(2, 2, 2)
        autocast = config.deepspeed.keys.get("torch_autocast", {}).get("enabled", False)
        return cls(FP32, 2, FP32) if autocast else cls(FP32, FP32, FP32)

    def weight_copies(self, numel: int) -> int:
        """Autocast's 16-bit copies of matrices live as long as what they were multiplied by."""
        return 0 if self.compute == self.weights else numel * self.compute


class Activations:
    """Bytes by part of the model, for micro-batches of one shape.

    Under expert parallelism the rank is taken to receive as many tokens as it sends.
    """

    def __init__(self, config: RunConfig, batch: BatchShape) -> None:
        self.config, self.model, self.batch = config, config.model, batch
        self.precision = Precision.of(config)
        self.tokens = batch.rows * batch.sequence_length
        self.vectors = self.tokens * self.model.hidden_size

    @functools.cached_property
    def moe(self) -> MoEConfig:
        return self.model.moe_config()

    def total(self) -> int:
        """What is kept at the end of the forward pass, or under activation checkpointing while a block is computed
        anew, if that is more."""
        kept = self.embeddings() + self.norm() + self.head() + self.kept_by_blocks()
        if not self.config.m6.training.activation_checkpointing:
            return kept
        return kept + self.tokens * (self.batch.sequence_length + 1) + self.recomputation()  # with the masks

    def kept_by_blocks(self) -> int:
        if self.config.m6.training.activation_checkpointing:
            return self.model.num_layers * self.block_input()
        return sum(self.blocks())

    def replicated(self) -> int:
        """Of that, what tensor parallelism would not split: the inputs of blocks, or five vectors of each.

        Equation 2 of arXiv 2205.05198.
        """
        vectors = 1 if self.config.m6.training.activation_checkpointing else 5
        return min(self.kept_by_blocks(), vectors * self.model.num_layers * self.block_input())

    def loss_backward(self) -> int:
        """What lives beside that when the backward pass begins: the gradients of the log-probabilities and of the
        logits."""
        gradients = 2 * self.batch.targets * self.model.vocab_size * FP32
        return max(0, gradients - self.recomputation())

    def recomputation(self) -> int:
        """By how much the largest block, computed anew, exceeds the head, whose part is freed before."""
        if not self.config.m6.training.activation_checkpointing:
            return 0
        return max(0, max(self.blocks()) - self.block_input() - self.head())

    def blocks(self) -> list[int]:
        kinds = [self.model.is_moe_layer(layer) for layer in range(self.model.num_layers)]
        each = {sparse: self.block(sparse) for sparse in set(kinds)}
        return [each[sparse] for sparse in kinds]

    def block_input(self) -> int:
        return self.vectors * self.precision.residual

    def embeddings(self) -> int:
        """Ids of tokens, positions and segments; the patch encoder and the places of the patches; dropout."""
        places = 3 * _INT64 * (self.tokens + self.batch.pictures * self.model.num_patches)
        dropout = self.vectors * self.precision.residual if self.model.hidden_dropout else 0
        return places + self.patch_encoder() + dropout

    def patch_encoder(self) -> int:
        """Two of the three are other people's networks: run on the meta device, not derived."""
        if not self.batch.pictures:
            return 0
        copied = self.precision.compute != self.precision.weights
        with torch.device("meta"):
            encoder = build_patch_encoder(self.model)
            encoder.to(torch.float32 if self.precision.compute == FP32 else torch.bfloat16)
            pictures = torch.empty(self.batch.pictures, 3, self.model.image_size, self.model.image_size)
        # Autocast's copies count where autograd keeps a weight, that is, where the layer's input has a gradient.
        with SavedTensors(nn.Identity() if copied else encoder) as saved:
            encoder(pictures)
        return saved.bytes

    def block(self, sparse: bool) -> int:
        dropout = 0
        if self.model.hidden_dropout:
            # On the CPU dropout keeps factors in the type of its input, not bits.
            output = self.precision.residual if sparse else self.precision.compute
            dropout = self.vectors * (self.precision.compute + output)
        return 2 * self.norm() + self.attention() + (self.experts() if sparse else self.dense_ffn()) + dropout

    def norm(self) -> int:
        """The input, and for each token its mean and deviation."""
        return (self.vectors + 2 * self.tokens) * self.precision.residual

    def attention(self) -> int:
        compute, heads, width = self.precision.compute, self.model.num_attention_heads, self.model.hidden_size
        kept = self.vectors * compute  # the result
        kept += self.vectors * compute + self.precision.weight_copies(4 * width**2)  # the input
        scores = self.tokens * self.batch.sequence_length
        if self.model.attention_dropout:
            # Only the kernel that writes the scores out has dropout, and it works in fp32: queries, keys, values;
            # probabilities, factors, their product.
            return kept + 3 * (self.vectors + heads * scores) * FP32
        # The flash kernel keeps no scores, but the mask as numbers that are added to them, and logsumexp.
        return kept + (3 * self.vectors + scores) * compute + heads * self.tokens * FP32

    def dense_ffn(self) -> int:
        """The input, and the inner values before and after GELU."""
        width, inner = self.model.hidden_size, self.model.ffn_hidden_size
        elements = self.vectors + 2 * self.tokens * inner
        return elements * self.precision.compute + self.precision.weight_copies(2 * width * inner)

    def experts(self) -> int:
        """The tokens, unless they are those of the router; inner values before and after the activation; outputs."""
        moe, width, inner = self.moe, self.model.hidden_size, self.model.ffn_hidden_size
        real, rows, precision = self.batch.real, self.rows(), self.precision
        # Each row's choice, its token, its gate; the rows by token, and where each token's begin.
        dispatch = rows * (3 * _INT64 + FP32) + real * _INT64
        inner_inputs = inner * (2 if moe.activation == "swiglu" else 1)
        kept = inner_inputs if moe.recompute_activation else inner_inputs + inner + width
        networks = rows * kept * precision.compute + (rows * inner if moe.expert_dropout else 0)
        copied_tokens = real * width * precision.compute if precision.compute != precision.residual else 0
        networks += copied_tokens + precision.weight_copies(self.local_experts() * width * (inner_inputs + inner))
        if moe.num_shared_experts:
            shared, gate = moe.num_shared_experts, int(moe.shared_expert_gate)
            elements = shared * 2 * inner_inputs + gate * (width + 1)  # with the gate, what it multiplies and itself
            networks += copied_tokens + real * elements * precision.compute
            networks += precision.weight_copies(width * (shared * (inner_inputs + inner) + gate))
        return self.router() + dispatch + networks + self.combined(width)

    def rows(self) -> int:
        """(token, expert) pairs that are computed; padding takes part neither in routing nor in the experts."""
        moe, real = self.moe, self.batch.real
        choices = real * moe.experts_per_token
        capacity = moe.capacity(real, training=True)
        return choices if capacity is None else min(choices, capacity * moe.num_experts)

    def router(self) -> int:
        moe, real, width = self.moe, self.batch.real, self.model.hidden_size
        # The tokens in the type in which they come, and the noise on them.
        router = real * width * (self.precision.residual + (FP32 if moe.router_jitter else 0))
        # Scores, which experts were chosen, and for the z loss logits and their logsumexp.
        router += real * moe.num_experts * FP32 + real * moe.experts_per_token * _INT64
        if moe.z_loss_weight:
            router += real * (moe.num_experts + moe.num_prototypes) * FP32
        return router

    def local_experts(self) -> int:
        return self.moe.num_experts // self.config.m6.training.ep_size

    def combined(self, output_size: int) -> int:
        """The real tokens' places, and their results before these are spread over the rows of the batch."""
        return self.batch.real * (_INT64 + output_size * self.precision.residual)

    def head(self) -> int:
        """At labelled positions alone: hidden states; log-probabilities in fp32; places, labels, weights."""
        width, vocab_size = self.model.hidden_size, self.model.vocab_size
        each = width * self.precision.compute + vocab_size * FP32 + 3 * _INT64 + 2 * FP32
        return self.batch.targets * each + self.precision.weight_copies(vocab_size * width)
