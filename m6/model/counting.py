"""Counts the parameters of a configuration without building the model."""

from collections.abc import Iterable

import torch

from m6.architecture.settings import ModelSettings
from m6.architecture.sharing import SharedPart, Sharing
from m6.model.embeddings import NUM_SEGMENTS
from m6.model.patch_encoders import build_patch_encoder


def num_parameters(
    config: ModelSettings, sharing: Sharing | None = None, experts_per_token: float | None = None
) -> dict[str, int]:
    """Counts the parameters of ``M6ForConditionalGeneration(config)`` by part.

    Args:
        config: of the model.
        sharing: the weight sharing of the Pseudo model; a shared parameter counts once. None: the Real model.
        experts_per_token: the mean number of routed experts per token of a sparse layer after drops by the capacity,
            for example from ``RunConfig.expected_routing``. None: all chosen experts, as without a capacity.

    Returns:
        ``embeddings`` (tokens, positions, segments), ``patch_encoder``, ``attention``, ``ffn`` (dense layers),
        ``experts``, ``router`` and ``norms``; ``total``, their sum; and ``active_per_token``, the total without the
        idle routed experts of a token. A token chooses ``num_prototypes * top_k`` experts of each layer; a capacity may
        drop some of them. Shared experts compute every token.
    """
    width, layers = config.hidden_size, range(config.num_layers)
    sparse = [layer for layer in layers if config.is_moe_layer(layer)]
    dense = [layer for layer in layers if not config.is_moe_layer(layer)]

    def copies(part: SharedPart, layers: Iterable[int]) -> int:
        if sharing is not None and part in sharing.parts:
            return len({sharing.first_layer(layer) for layer in layers})
        return len(list(layers))

    inner = config.ffn_hidden_size
    ffn = 2 * width * inner + inner + width
    projections = 4 * width * width
    expert = shared = experts = 0
    computing = 0.0
    if config.moe is not None:
        moe = config.moe_config()
        experts, computing = moe.num_experts, moe.experts_per_token
        if experts_per_token is not None:
            computing = experts_per_token
        # SwiGLU has two input matrices of ``inner`` rows, the activation and its gate, stored as one.
        rows_in = 2 * inner if moe.activation == "swiglu" else inner
        expert = (rows_in + inner) * width + (rows_in + width if moe.bias else 0)
        shared = moe.num_shared_experts * (rows_in + inner) * width
        if moe.bias and shared:
            shared += moe.num_shared_experts * rows_in + width
        if moe.shared_expert_gate:
            shared += width
    # Two of the three patch encoders come from other packages: it is safer to build them than to derive their size.
    with torch.device("meta"):
        patch_encoder = build_patch_encoder(config)
    positions = config.max_position_embeddings + config.num_patches + 2 * config.code_grid_size
    counts = {
        "embeddings": (config.vocab_size + positions + NUM_SEGMENTS) * width,
        "patch_encoder": sum(parameter.numel() for parameter in patch_encoder.parameters()),
        "attention": copies("attention", layers) * (projections + 4 * width),
        "ffn": copies("ffn", dense) * ffn,
        "experts": copies("experts", sparse) * (experts * expert + shared),
        "router": copies("router", sparse) * experts * width,
        # Two norms per layer and the last one, each with a weight and a bias vector.
        "norms": (2 * copies("norms", layers) + 1) * 2 * width,
    }
    total = sum(counts.values())  # the output matrix is the token embedding, so it is not counted again
    idle = round((experts - computing) * copies("experts", sparse) * expert)
    return {**counts, "total": total, "active_per_token": total - idle}
