"""Self-attention with rotary positions, and the prefix-LM mask: it makes one stack both encoder and decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from m6.architecture.names import TARGET
from m6.architecture.settings import ModelSettings
from m6.model.slices import SliceCache
from moe.deferred_gradients import DeferredLinear

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles, each [S, size / 2] in fp64."""


def rotation_of(index: Tensor, size: int, base: float) -> Rotation:
    """The angles of positions (Su et al. 2021, arXiv 2104.09864, equation 15).

    Args:
        index: int64 [S], positions in the row, or in the cache.
        size: of a head.
        base: pair i of a head's ``size / 2`` pairs turns by ``base ** (-2 i / size)`` radians per position.
    """
    # In fp64, so scores at the same distance are equal wherever a row begins.
    frequencies = base ** (-torch.arange(0, size, 2, device=index.device, dtype=torch.float64) / size)
    angles = index.unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotates queries or keys [B, H, S, size]. A pair is element i of the first half with element i of the second."""
    cosines, sines = (part.to(heads.dtype) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


LONGEST_PRODUCTS = 192  # keys, see attend_by_products


def prefix_lm_mask(token_type_ids: Tensor, sample_ids: Tensor, past_length: int | Tensor = 0) -> Tensor:
    """The attention mask: images and source in both directions, the target causally (M6, section 3).

    A query attends to two kinds of keys of its own sample: all keys of images and source, and all keys up to its own
    position. A padding token attends only to itself, so its softmax stays finite. All layers use the same mask.

    Args:
        token_type_ids: int64 [B, S] of the queries.
        sample_ids: int64 [B, K] of the keys, 0 at padding; K is at least ``past_length + S``.
        past_length: number of keys from earlier calls; every query may attend to all of them.

    Returns:
        bool [B, 1, S, K], True where attention is allowed.
    """
    batch, length = token_type_ids.shape
    keys = sample_ids.shape[1]
    key_index = torch.arange(keys, device=token_type_ids.device)
    query_index = torch.arange(length, device=token_type_ids.device) + past_length
    # A key without a query in this call is an earlier one, or an unwritten position at the end of a static cache. As a
    # TARGET it follows only the causal rule. This rule shows earlier keys and hides unwritten ones.
    key_types = token_type_ids.new_full((batch, keys), TARGET).index_copy(1, query_index, token_type_ids)
    query_samples = sample_ids.index_select(1, query_index).unsqueeze(-1)
    reachable = (key_types != TARGET).unsqueeze(1) | (key_index <= query_index.unsqueeze(-1))
    visible = (query_samples == sample_ids.unsqueeze(1)) & (query_samples != 0) & reachable
    return (visible | (key_index == query_index.unsqueeze(-1))).unsqueeze(1)


class StateLayout:
    """The layout of hidden states between and inside of blocks: [B, S, D], whole on each rank."""

    def shape(self, rows: int, length: int) -> tuple[int, ...]:
        """The shape of hidden states without their last dimension, for B rows of S tokens."""
        return rows, length

    def divided(self, hidden_states: Tensor) -> Tensor:
        """Brings hidden states [B, S, D], equal on all ranks of a tensor group, into this layout."""
        return hidden_states

    def whole(self, hidden_states: Tensor, rows: int, length: int) -> Tensor:
        """Returns [B, S, D] from hidden states in this layout. Later computation is equal on all ranks."""
        return hidden_states

    def dropout(self, module: nn.Dropout, hidden_states: Tensor, rows: int, length: int) -> Tensor:
        """Applies the dropout of B rows of S tokens to hidden states in this layout."""
        dropped: Tensor = module(hidden_states)
        return dropped

    def of_tokens(self, projected: Tensor, rows: int, length: int) -> Tensor:
        """Returns [B, S, Q] from the projection of all tokens for this rank's heads."""
        return projected

    def for_parts(self, attended: Tensor) -> Tensor:
        """Returns the input [..., P] of the output projection from [B, S, P]."""
        return attended


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.layout = StateLayout()
        self.dropout = config.attention_dropout
        self.qkv = DeferredLinear(config.hidden_size, 3 * config.hidden_size)
        self.output = DeferredLinear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor,
        past_key_values: Cache | SliceCache | None,
        layer_index: int,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Maps hidden states to hidden states, [B, S, D] or as the layout has them.

        Args:
            mask: bool [B, 1, S, K], True where attention is allowed.
            layer_index: the layer's number in the cache. It is an argument, since several layers may share this
                module (Pseudo-to-Real).
            rotation: of queries and keys; None: no rotary positions.
        """
        projected = self.layout.of_tokens(self.qkv(hidden_states), len(mask), mask.shape[2])
        # [B, S, 3 D] -> three tensors [B, H, S, D / H].
        query, key, value = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            # The values are copied, so autograd keeps no view of the projections and their memory is freed.
            query, key, value = rotate(query, rotation), rotate(key, rotation), value.contiguous()
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, layer_index)
        dropout = self.dropout if self.training else 0.0
        if query.device.type == "cpu" and query.dtype.itemsize == 2 and key.shape[2] <= LONGEST_PRODUCTS:
            attended = attend_by_products(query, key, value, mask, dropout)
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return self.output(self.layout.for_parts(attended.transpose(1, 2).flatten(2)))


def attend_by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """The same as PyTorch's scaled_dot_product_attention, with the whole matrix of scores.

    In 16 bits on a CPU, PyTorch's fused kernel takes twice as long for 140 tokens, and less time for 280
    (scripts/benchmarks/results/attention_cpu.md).
    """
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)
    # A sum, because the backward pass of masked_fill would fill the gradient, and it is 0 there anyway.
    hidden = torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, -torch.inf)
    # The softmax computes in fp32 and rounds its result.
    weights = (scores + hidden).softmax(dim=-1)
    return F.dropout(weights, dropout) @ value
