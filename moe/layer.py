"""The mixture-of-experts layer."""

import math
from collections.abc import Callable, Generator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.dispatch import Dispatcher, LocalDispatcher
from moe.experts import Experts, SharedExperts
from moe.losses import Sequences
from moe.parts import SequenceSlice
from moe.routing import Router, RouterLosses, Routing, RoutingStats, route


class MoEOutput(NamedTuple):
    """The output of a layer.

    Attributes:
        hidden_states: [..., D], zero at padding.
        aux_loss: [] the sum of the weighted auxiliary losses, to be added to the model's loss: a mean over tokens.
        stats: see ``RoutingStats``.
        aux_losses: [...] the auxiliary losses of each token, 0 at padding; ``aux_loss`` is their mean without padding.
            None for a part of the tokens.
    """

    hidden_states: Tensor
    aux_loss: Tensor
    stats: RoutingStats
    aux_losses: Tensor | None


class MoELayer(nn.Module):
    """A feed-forward layer with E experts; K of them compute each token: M6-T (arXiv 2105.15082), section 3.

    The layer stores nothing between calls, so activation checkpointing may repeat a call.
    Its parameters belong to ``router``, ``experts`` and, with ``config.num_shared_experts``, ``shared``.

    Args:
        hidden_size: D.
        ffn_hidden_size: F.
        config: see ``MoEConfig``.
        device, dtype: of the parameters, as in PyTorch's modules; None: PyTorch's defaults.

    Attributes:
        hidden_size, ffn_hidden_size, config: the arguments.
        dispatcher: brings the tokens to the experts, see ``moe.dispatch``.
        balance_group: for ``balance_scope`` "global_batch", the ranks with tokens to count; None: all.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        config: MoEConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.ffn_hidden_size, self.config = hidden_size, ffn_hidden_size, config
        self.router = Router(hidden_size, config, device, dtype)
        arguments = (hidden_size, ffn_hidden_size, config, device, dtype)
        self.experts = Experts(*arguments)
        self.shared = SharedExperts(*arguments) if config.num_shared_experts else None
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.balance_group: torch.distributed.ProcessGroup | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, deviation: float = 0.02, num_layers: int | None = None) -> None:
        """Draws all matrices from a normal distribution, independently for each expert, and sets all biases to 0.

        Args:
            deviation: the standard deviation.
            num_layers: the number of layers of the model. ``w_out`` is divided by sqrt(2 * num_layers), because it
                writes to the residual stream; 2 * num_layers is the number of such matrices in the model (GPT-2,
                section 2.3). None: no division.
        """
        scale = 1 if num_layers is None else 1 / math.sqrt(2 * num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("b_in", "b_out")):
                parameter.zero_()
            else:
                parameter.normal_(std=deviation * (scale if name.endswith("w_out") else 1))
        if self.router.balance_bias is not None:
            self.router.balance_bias.zero_()

    def forward(
        self, hidden_states: Tensor, token_mask: Tensor | None = None, part: SequenceSlice | None = None
    ) -> MoEOutput:
        """Routes the tokens and computes them.

        Args:
            hidden_states: [..., D].
            token_mask: bool or integers [...], False or 0 at padding, like the ``attention_mask`` of transformers'
                tokenizers. Padding is neither routed nor counted. None: there is no padding. A mask makes the host wait
                for the device once. For ``balance_scope`` "sequence", tokens of a row with the same integer form a
                sequence, and the host waits twice.
            part: the position of these tokens among all tokens of auxiliary losses and capacities; None: these are all
                tokens.

        Raises:
            ValueError: a shape, type or device does not fit the layer.
        """
        tokens, real = self._flatten_and_unpad(hidden_states, token_mask)
        routing, losses, stats = self._route(tokens, hidden_states, token_mask, real, part)
        output = self.dispatcher(tokens, routing, self.experts, self._shared_branch())
        return _output(output, losses, stats, real, hidden_states)

    def staged_forward(
        self, hidden_states: Tensor, token_mask: Tensor | None = None
    ) -> Generator[None, None, MoEOutput]:
        """The forward pass as a generator with two pauses: one during the dispatch, one during the combine.

        The caller computes something else in the pauses, such as another micro-batch. Needs ``overlap_parts`` 1.
        """
        tokens, real = self._flatten_and_unpad(hidden_states, token_mask)
        routing, losses, stats = self._route(tokens, hidden_states, token_mask, real)
        output, concurrent = (
            (yield from self.dispatcher.staged_forward(tokens, routing, self.experts)),
            self._shared_branch(),
        )
        if concurrent is not None:
            output = output + concurrent(tokens)
        return _output(output, losses, stats, real, hidden_states)

    def _flatten_and_unpad(self, hidden_states: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens without padding [T, D], and their indices among all tokens; None: there is no padding."""
        self._check(hidden_states, token_mask)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if token_mask is None:
            return tokens, None
        # Padding must not take part in the capacity or in the losses, so it is removed before routing.
        real = token_mask.reshape(-1).nonzero().squeeze(-1)
        return tokens.index_select(0, real), real

    def _sequences(
        self, hidden_states: Tensor, token_mask: Tensor | None, real: Tensor | None, part: SequenceSlice | None
    ) -> Sequences | None:
        """Returns the sequences of the tokens for ``balance_scope`` "sequence", else None.

        A sequence is a row, or all tokens of a row with the same integer in the mask.
        """
        if self.config.balance_scope != "sequence" or not self.config.aux_loss_weight:
            return None
        shape = hidden_states.shape[:-1]
        rows, places = shape[:-1].numel(), _indices(hidden_states, real)
        numbers = places // max(shape[-1], 1)
        if token_mask is None or token_mask.dtype == torch.bool or not token_mask.numel():
            return Sequences(numbers, rows)
        # 0 is padding, so the sequences of a row have the integers from 1 on.
        per_row = int(token_mask.max()) if part is None else part.whole.sequences_per_row
        return Sequences(numbers * per_row + token_mask.reshape(-1)[places] - 1, rows * per_row)

    def _route(
        self,
        tokens: Tensor,
        hidden_states: Tensor,
        token_mask: Tensor | None,
        real: Tensor | None,
        part: SequenceSlice | None = None,
    ) -> tuple[Routing, RouterLosses, RoutingStats]:
        bias, sequences = self.router.balance_bias, self._sequences(hidden_states, token_mask, real, part)
        places = None
        if self.config.drop_order == "causal":
            places = _indices(hidden_states, real) % max(hidden_states.shape[:-1][-1:].numel(), 1)
        logits = self.router(tokens)
        return route(logits, self.config, self.training, bias, part, sequences, self.balance_group, places)

    def _shared_branch(self) -> Callable[[Tensor], Tensor] | None:
        shared = self.shared
        return None if shared is None else lambda part: shared(part).to(part.dtype)

    def _check(self, hidden_states: Tensor, token_mask: Tensor | None) -> None:
        weight = self.router.weight
        if hidden_states.shape[-1:] != weight.shape[-1:]:
            raise ValueError(
                f"hidden_states has the shape {tuple(hidden_states.shape)}; expected {weight.shape[-1]} columns"
            )
        if not hidden_states.is_floating_point():
            raise ValueError(f"hidden_states is {hidden_states.dtype}; expected a floating-point type")
        # Weights offloaded by accelerate are on "meta" until their module is called.
        if hidden_states.device != weight.device and not weight.is_meta:
            raise ValueError(f"hidden_states is on {hidden_states.device}, but the layer on {weight.device}")
        if token_mask is None:
            return
        if token_mask.is_floating_point():  # such masks are added to scores: 0 is a token
            raise ValueError(f"token_mask is {token_mask.dtype}; expected torch.bool or integers, 0 at padding")
        if token_mask.shape != hidden_states.shape[:-1] or token_mask.device != hidden_states.device:
            raise ValueError(
                f"token_mask has the shape {tuple(token_mask.shape)} on {token_mask.device}; expected "
                f"{tuple(hidden_states.shape[:-1])} on {hidden_states.device}, as hidden_states without its last"
            )


def _indices(hidden_states: Tensor, real: Tensor | None) -> Tensor:
    """The indices of the tokens without padding among all tokens, [T]."""
    return torch.arange(hidden_states.shape[:-1].numel(), device=hidden_states.device) if real is None else real


def _output(output: Tensor, losses: RouterLosses, stats: RoutingStats, real: Tensor | None, like: Tensor) -> MoEOutput:
    """Reshapes outputs [T, D] and losses [T] of the tokens at the indices ``real`` like ``like``, with 0 at padding."""
    of_tokens = losses.of_tokens
    if real is not None:
        size = like.shape[:-1].numel()
        output = output.new_zeros(size, output.shape[1]).index_copy(0, real, output)
        of_tokens = None if of_tokens is None else of_tokens.new_zeros(size).index_copy(0, real, of_tokens)
    of_tokens = None if of_tokens is None else of_tokens.reshape(like.shape[:-1])
    return MoEOutput(output.reshape(like.shape), losses.mean, stats, of_tokens)
