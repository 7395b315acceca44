"""The mixture-of-experts layer."""

from typing import NamedTuple

from torch import Tensor, nn

from moe.config import MoEConfig
from moe.dispatch import Dispatcher, LocalDispatcher
from moe.experts import Experts
from moe.routing import Router, RoutingStats, route


class MoEOutput(NamedTuple):
    """
    Attributes:
        hidden_states: [..., D_out], zero at padding; D_out is D, but for ``MoELinear``.
        aux_loss: [] sum of the balancing losses times their weights; to be added to the model's loss.
        stats: see ``RoutingStats``.
    """

    hidden_states: Tensor
    aux_loss: Tensor
    stats: RoutingStats


class MoELayer(nn.Module):
    """A feed-forward layer that computes each token by K of its E experts: M6-T (arXiv 2105.15082), section 3.

    It keeps nothing between calls, so a recomputation under activation checkpointing changes nothing.
    Parameters: ``router.weight`` [E, D], ``experts.w_in`` [E, F, D], ``experts.w_out`` [E, D, F].

    Args:
        hidden_size: D.
        ffn_hidden_size: F.
        config: see ``MoEConfig``.
    """

    def __init__(self, hidden_size: int, ffn_hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(hidden_size, config)
        self.experts = Experts(hidden_size, ffn_hidden_size, config)
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all matrices from a normal distribution of deviation 0.02, every expert its own."""
        for weight in (self.router.weight, self.experts.w_in, self.experts.w_out):
            nn.init.normal_(weight, std=0.02)

    def forward(self, hidden_states: Tensor, token_mask: Tensor | None = None) -> MoEOutput:
        """
        Args:
            hidden_states: [..., D].
            token_mask: bool [...], False at padding, which is neither routed nor counted; None: no padding.
                Finding the padding waits for the device once.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if token_mask is None:
            output, aux_loss, stats = self._forward(tokens)
        else:
            real = token_mask.reshape(-1).nonzero().squeeze(-1)
            output, aux_loss, stats = self._forward(tokens.index_select(0, real))
            output = output.new_zeros(len(tokens), output.shape[1]).index_copy(0, real, output)
        return MoEOutput(output.unflatten(0, hidden_states.shape[:-1]), aux_loss, stats)

    def _forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, RoutingStats]:
        routing, aux_loss, stats = route(self.router(tokens), self.config, self.training)
        return self.dispatcher(tokens, routing, self.experts), aux_loss, stats
