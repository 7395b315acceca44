"""How many parameters a configuration has, without building the model."""

import torch

from m6.model.configuration import M6Config
from m6.model.embeddings import NUM_SEGMENTS
from m6.model.patch_encoders import build_patch_encoder


def num_parameters(config: M6Config) -> dict[str, int]:
    """Counts the parameters of ``M6ForConditionalGeneration(config)`` by part.

    Returns:
        ``embeddings`` (tokens, positions, segments), ``patch_encoder``, ``attention`` and ``ffn`` (dense ones),
        ``experts``, ``router``, ``norms``; ``total``, their sum; and ``active_per_token``: the total with, of
        every router, only the ``num_prototypes * top_k`` experts that one token visits.
    """
    width, layers = config.hidden_size, config.num_layers
    sparse = config.num_moe_layers
    expert = 2 * width * config.ffn_hidden_size
    ffn = expert + config.ffn_hidden_size + width  # experts have no biases
    moe_attentions = sparse if config.moe_attention else 0
    projections = 4 * width * width
    experts = chosen = 0
    if config.moe is not None:
        moe = config.moe_config()
        experts, chosen = moe.num_experts, moe.num_prototypes * moe.top_k
    with torch.device("meta"):  # two of the three patch encoders are other people's networks: built, not derived
        patch_encoder = build_patch_encoder(config)
    counts = {
        "embeddings": (config.vocab_size + config.max_position_embeddings + config.num_patches + NUM_SEGMENTS) * width,
        "patch_encoder": sum(parameter.numel() for parameter in patch_encoder.parameters()),
        "attention": (layers - moe_attentions) * (projections + 4 * width),
        "ffn": (layers - sparse) * ffn,
        "experts": experts * (sparse * expert + moe_attentions * projections),
        "router": (sparse + 2 * moe_attentions) * experts * width,
        "norms": (2 * layers + 1) * 2 * width,
    }
    total = sum(counts.values())
    unvisited = counts["experts"] * (experts - chosen) // max(experts, 1)
    return {**counts, "total": total, "active_per_token": total - unvisited}
