"""The outputs of the models' forward passes."""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from moe import RoutingStats


@dataclass
class M6ModelOutput(ModelOutput):
    """Output of :class:`m6.model.modeling.M6Model`.

    Attributes:
        last_hidden_state: [B, S, hidden_size], after the final norm.
        hidden_states: with ``output_hidden_states`` the input of each block, then ``last_hidden_state``; else None.
        aux_loss: scalar fp32, the sum of the sparse layers' weighted router losses, each a mean over tokens; 0 for a
            dense model.
        aux_losses: fp32 [B], the same for each row: a mean over its tokens.
        router_stats: one entry per sparse layer, in the order of the forward pass.
        past_key_values: the cache, if one is used.
    """

    last_hidden_state: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
    aux_losses: torch.Tensor | None = None
    router_stats: tuple[RoutingStats, ...] | None = None
    past_key_values: Cache | None = None


@dataclass
class M6Output(ModelOutput):
    """Output of :class:`m6.model.modeling.M6ForConditionalGeneration`.

    Attributes:
        loss: scalar, ``sum(weight * cross entropy) / num_items_in_batch``; None without labels. In training mode the
            router losses of each row are added, times its share of the items: see ``num_items_in_batch``.
        logits: [B, S, vocab_size], or [B, logits_to_keep, vocab_size]; None with ``return_logits=False``.
        target_losses: [N] unweighted cross entropy of each labelled target in row-major order, in nats, fp32
            (fp64 for a double-precision model); None without labels.
        hidden_states, aux_loss, router_stats, past_key_values: as in :class:`M6ModelOutput`.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    target_losses: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
    router_stats: tuple[RoutingStats, ...] | None = None
    past_key_values: Cache | None = None
