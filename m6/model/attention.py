"""Self-attention and the prefix-LM mask that makes one stack both encoder and decoder."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from m6.model.configuration import M6Config
from m6.tokenizers.special_tokens import TARGET


def prefix_lm_mask(token_type_ids: Tensor, sample_ids: Tensor, past_length: int | Tensor = 0) -> Tensor:
    """Who may attend to whom: pictures and source in both directions, the target causally; M6, section 3.

    A query attends a key of its own sample that is no target, or that is not later than itself. Padding
    attends itself alone, which keeps its softmax finite. Built once per forward pass, for all layers.

    Args:
        token_type_ids: int64 [B, S] of the queries.
        sample_ids: int64 [B, K] of the keys, 0 at padding; K is at least ``past_length + S``.
        past_length: keys that were computed by earlier calls, which all queries see in full.

    Returns:
        bool [B, 1, S, K], True where attention is allowed.
    """
    batch, length = token_type_ids.shape
    keys = sample_ids.shape[1]
    key_index = torch.arange(keys, device=token_type_ids.device)
    query_index = torch.arange(length, device=token_type_ids.device) + past_length
    # Keys that no query stands at are earlier ones or the unwritten end of a static cache: the causal half of
    # the rule, which the type TARGET leaves alone, shows the former and hides the latter.
    key_types = token_type_ids.new_full((batch, keys), TARGET).index_copy(1, query_index, token_type_ids)
    query_samples = sample_ids.index_select(1, query_index).unsqueeze(-1)
    reachable = (key_types != TARGET).unsqueeze(1) | (key_index <= query_index.unsqueeze(-1))
    visible = (query_samples == sample_ids.unsqueeze(1)) & (query_samples != 0) & reachable
    return (visible | (key_index == query_index.unsqueeze(-1))).unsqueeze(1)


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, mask: Tensor, past_key_values: Cache | None, layer_index: int) -> Tensor:
        """Maps [B, S, D] to [B, S, D].

        ``mask`` is bool [B, 1, S, K]. The layer's place in the cache is an argument, since layers may share one
        module (Pseudo-to-Real).
        """
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, layer_index)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        return self.output(attended.transpose(1, 2).flatten(2))
