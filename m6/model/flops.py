"""The FLOPs of a training step."""

from __future__ import annotations

from m6.model.configuration import M6Config
from m6.model.counting import num_parameters


def training_flops(config: M6Config, tokens: float, targets: float, pictures: float, token_pairs: float) -> float:
    """FLOPs of the forward and backward pass: 6 per token and parameter (Kaplan et al. 2020, arXiv 2001.08361, 2.1).

    The output matrix counts only at targets and the patch encoder only at patches. Attention counts half of the pairs
    of tokens of a sample, as for causal attention. Embeddings and recomputation do not count. A convolutional patch
    encoder needs more FLOPs than this function returns.

    Args:
        config: of the model.
        tokens: number of tokens without padding.
        targets: number of tokens with a loss.
        pictures: number of pictures that the model reads.
        token_pairs: sum of the squared lengths of the samples.
    """
    counts = num_parameters(config)
    per_token = 6.0 * (counts["active_per_token"] - counts["embeddings"] - counts["patch_encoder"])
    attention = 6.0 * config.num_layers * config.hidden_size * token_pairs
    patches = 6.0 * counts["patch_encoder"] * pictures * config.num_patches
    return tokens * per_token + attention + patches + targets * 6.0 * config.vocab_size * config.hidden_size
