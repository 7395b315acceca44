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
        every router, only the ``num_prototypes * top_k`` experts that one token visits, and the shared ones.
    """
    width, layers = config.hidden_size, config.num_layers
    sparse = config.num_moe_layers
    inner = config.ffn_hidden_size
    ffn = 2 * width * inner + inner + width
    moe_attentions = sparse if config.moe_attention else 0
    projections = 4 * width * width
    expert = shared = experts = chosen = 0
    if config.moe is not None:
        moe = config.moe_config()
        experts, chosen = moe.num_experts, moe.experts_per_token
        rows_in = 2 * inner if moe.activation == "swiglu" else inner
        expert = (rows_in + inner) * width + (rows_in + width if moe.bias else 0)
        shared = moe.num_shared_experts * (rows_in + inner) * width
        if moe.bias and shared:
            shared += moe.num_shared_experts * rows_in + width
    with torch.device("meta"):  # two of the three patch encoders are other people's networks: built, not derived
        patch_encoder = build_patch_encoder(config)
    counts = {
        "embeddings": (config.vocab_size + config.max_position_embeddings + config.num_patches + NUM_SEGMENTS) * width,
        "patch_encoder": sum(parameter.numel() for parameter in patch_encoder.parameters()),
        "attention": (layers - moe_attentions) * (projections + 4 * width),
        "ffn": (layers - sparse) * ffn,
        "experts": sparse * (experts * expert + shared) + moe_attentions * experts * projections,
        "router": (sparse + 2 * moe_attentions) * experts * width,
        "norms": (2 * layers + 1) * 2 * width,
    }
    total = sum(counts.values())
    unvisited = (experts - chosen) * (sparse * expert + moe_attentions * projections)
    return {**counts, "total": total, "active_per_token": total - unvisited}
