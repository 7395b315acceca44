"""The blocks of the transformer, and the loop over them."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from m6.architecture.settings import ModelSettings
from m6.model.attention import Attention, Rotation, StateLayout
from m6.model.slices import SliceCache
from moe import DeferredLinear, MoELayer, MoEOutput, RoutingStats, defer_gradients

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, and its low half too: the CPU's generator reads only 32 bits of a seed


class DenseFFN(nn.Module):
    """The dense feed-forward: two matrices with GELU between them."""

    def __init__(self, config: ModelSettings) -> None:
        super().__init__()
        self.input = DeferredLinear(config.hidden_size, config.ffn_hidden_size)
        self.output = DeferredLinear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps [..., D] to [..., D]."""
        return self.output(F.gelu(self.input(hidden_states)))


class BlockOutput(NamedTuple):
    """The output of a block.

    Attributes:
        hidden_states: [B, S, D], or as the block's ``layout`` has them.
        aux_loss: scalar, the weighted losses of a sparse block's router; None for a dense block.
        router_stats: one entry for a sparse block, none for a dense one.
        aux_losses: [B, S], the router losses of tokens, 0 at padding; ``aux_loss`` is their mean. None for a dense
            block and for slices.
    """

    hidden_states: Tensor
    aux_loss: Tensor | None = None
    router_stats: tuple[RoutingStats, ...] = ()
    aux_losses: Tensor | None = None


class M6Block(GradientCheckpointingLayer):
    """A pre-LN block: x + attention(norm(x)), then x + ffn(norm(x)); the feed-forward is dense or sparse."""

    def __init__(self, config: ModelSettings, layer_index: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        sparse = config.is_moe_layer(layer_index)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.ffn: DenseFFN | MoELayer
        if sparse:
            self.ffn = MoELayer(config.hidden_size, config.ffn_hidden_size, config.moe_config())
        else:
            self.ffn = DenseFFN(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layout = StateLayout()

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor,
        token_mask: Tensor,
        layer_index: int,
        past_key_values: Cache | SliceCache | None = None,
        rotation: Rotation | None = None,
    ) -> BlockOutput:
        """Runs the block.

        Args:
            hidden_states: [B, S, D], or as ``layout`` has them.
            mask: bool [B, 1, S, K], see ``prefix_lm_mask``.
            token_mask: int64 [B, S], the number of the sample; 0 at padding. Padding is not routed to experts.
            layer_index: the layer's number, see ``Attention.forward``.
            rotation: see ``Attention.forward``.
        """
        hidden_states, normed = self._attend(hidden_states, mask, layer_index, past_key_values, rotation)
        if isinstance(self.ffn, DenseFFN):
            return BlockOutput(self._added(hidden_states, self.ffn(normed), token_mask.shape))
        part = past_key_values.part(layer_index) if isinstance(past_key_values, SliceCache) else None
        return self._with(hidden_states, self.ffn(self.layout.whole(normed, *token_mask.shape), token_mask, part))

    def staged_forward(
        self,
        hidden_states: Tensor,
        mask: Tensor,
        token_mask: Tensor,
        layer_index: int,
        rotation: Rotation | None,
        following: Sequence[nn.Module] = (),
    ) -> Generator[None, None, BlockOutput]:
        """The same without checkpointing, as a generator. It pauses while a dispatch or combine is in flight.

        Args:
            following: the blocks up to the next pause. The backward pass delays the gradients of their weights, and
                computes them while the exchange of this block's output gradients is in flight.
        """
        hidden_states, normed = self._attend(hidden_states, mask, layer_index, None, rotation)
        if isinstance(self.ffn, DenseFFN):
            return BlockOutput(self._added(hidden_states, self.ffn(normed), token_mask.shape))
        staged = self.ffn.staged_forward(self.layout.whole(normed, *token_mask.shape), token_mask)
        return self._with(hidden_states, (yield from _deferring(following, staged)))

    def _with(self, hidden_states: Tensor, experts: MoEOutput) -> BlockOutput:
        """Adds the output of the experts to the residual stream."""
        added = self.layout.divided(experts.hidden_states)
        hidden_states = self._added(hidden_states, added, experts.hidden_states.shape[:2])
        return BlockOutput(hidden_states, experts.aux_loss, (experts.stats,), experts.aux_losses)

    def _added(self, hidden_states: Tensor, added: Tensor, shape: torch.Size) -> Tensor:
        """Adds the output of attention or feed-forward of [B, S] tokens to the residual stream, after dropout."""
        return hidden_states + self.layout.dropout(self.dropout, added, *shape)

    def _attend(
        self,
        hidden_states: Tensor,
        mask: Tensor,
        layer_index: int,
        past_key_values: Cache | SliceCache | None,
        rotation: Rotation | None,
    ) -> tuple[Tensor, Tensor]:
        """The hidden states after the attention, and the input of the feed-forward."""
        attended = self.attention(self.attention_norm(hidden_states), mask, past_key_values, layer_index, rotation)
        hidden_states = self._added(hidden_states, attended, mask.shape[:1] + mask.shape[2:3])
        return hidden_states, self.ffn_norm(hidden_states)


def _deferring(
    following: Sequence[nn.Module], staged: Generator[None, None, MoEOutput]
) -> Generator[None, None, MoEOutput]:
    """Runs dispatch, experts and combine, and defers weight gradients of the next blocks at the combine."""
    num_pauses = 0
    while True:
        try:
            next(staged)
        except StopIteration as end:
            return end.value
        num_pauses += 1
        if num_pauses == 2:
            for block in following:
                defer_gradients(block)
        yield


def run_blocks(
    blocks: Iterable[tuple[int, nn.Module]],
    hidden_states: Tensor,
    mask: Tensor,
    token_mask: Tensor,
    rotation: Rotation | None = None,
    past_key_values: Cache | SliceCache | None = None,
    dropout_seed: int | None = None,
) -> Iterator[BlockOutput]:
    """Runs blocks one after the other, and yields the output of each.

    Args:
        blocks: number in the whole model, and block.
        hidden_states: the input of the first one, in the layout of the blocks.
        mask, token_mask, rotation: see ``M6Block.forward``.
        dropout_seed: see ``seed_layer``.
    """
    for index, block in blocks:
        seed_layer(dropout_seed, index + 1, hidden_states.device)
        # Reentrant checkpointing makes a plain tuple of it.
        output = BlockOutput(
            *block(hidden_states, mask, token_mask, index, past_key_values=past_key_values, rotation=rotation)
        )
        hidden_states = output.hidden_states
        yield output


def seed_layer(seed: int | None, place: int, device: torch.device) -> None:
    """Seeds the random numbers of one layer, so they do not depend on the earlier layers of a process.

    Args:
        seed: of the micro-batch; None changes nothing.
        place: 0 for the embeddings, n + 1 for the block with number n.
        device: of the layer.
    """
    if seed is not None:
        number = (seed + place * _SEED_STRIDE) % 2**63
        # Not torch.manual_seed: it takes a millisecond to note the seed for absent kinds of devices.
        torch.default_generator.manual_seed(number)
        if device.type not in ("cpu", "meta"):
            torch.get_device_module(device).manual_seed(number)
