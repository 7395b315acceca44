"""The parameters of a model: their number, shared layers, low-rank adapters, and the groups of the optimizer.

Low-rank adapters (LoRA, arXiv 2106.09685) of linear layers are peft's. peft 0.21 also adapts stacked weights, but with
all experts in one matrix. Expert parallelism cannot shard such a matrix over ranks, so experts have adapters of their
own (``moe.experts``).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from m6.architecture.names import AdapterTarget
from m6.architecture.settings import ModelSettings
from m6.architecture.sharing import SharedPart, Sharing
from m6.model.embeddings import NUM_SEGMENTS
from m6.model.patch_encoders import build_patch_encoder
from moe import MoELayer
from moe.activations import ACTIVATIONS


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


def share_layers(model: nn.Module, sharing: Sharing) -> None:
    """Replaces the shared modules of each layer by those of the first layer of its group.

    Call it on the meta device, before parameters are allocated, and after expert parallelism has split the experts of
    each layer.
    """
    # The blocks may be in the model itself or in a submodule.
    layers: Any = next(m.layers for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList))
    for layer, first, name in sharing.modules():
        if layer != first and _has(layers[layer], name):
            layers[layer].set_submodule(name, layers[first].get_submodule(name))


def count_uses(model: nn.Module) -> dict[nn.Parameter, int]:
    """Counts the uses of each parameter: the number of its layers, or 1 outside of layers."""
    return Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))


def divide_gradients(model: nn.Module) -> None:
    """Makes the gradient of every shared parameter the mean over its uses (arXiv 2110.03848, algorithm 1, line 5).

    Autograd gives the sum. A hook divides the gradient before it is accumulated, so reduction, clipping and
    partitioning see the mean.
    """
    for parameter, uses in count_uses(model).items():
        if uses > 1 and parameter.requires_grad:
            parameter.register_hook(_Divide(uses))


class _Divide:
    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / self.divisor


def _has(layer: nn.Module, name: str) -> bool:
    try:
        layer.get_submodule(name)
    except AttributeError:
        return False
    return True


_MODULES: dict[str, tuple[str, ...]] = {
    "attention": ("attention.qkv", "attention.output"),
    "dense": ("ffn.input", "ffn.output"),
}


def add_adapters(model: nn.Module, rank: int, alpha: float, dropout: float, targets: Sequence[AdapterTarget]) -> None:
    """Replaces matrices W of a model on the meta device by W + alpha / rank * B A; only A and B are trained.

    Args:
        model: gets the adapters in place; all its other parameters are frozen.
        rank: rows of A and columns of B.
        alpha: scale of the adapters times ``rank``.
        dropout: rate at the input of A; experts have none.
        targets: kinds of matrices; the model must have matrices of each kind.
    """
    model.requires_grad_(False)
    modules = [name for target in targets for name in _MODULES.get(target, ())]
    if modules:
        from peft import LoraConfig, inject_adapter_in_model

        settings = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules)  # type: ignore[arg-type]
        with torch.device("meta"):
            inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    if "experts" in targets:
        for module in model.modules():
            if isinstance(module, MoELayer):
                module.experts.add_adapters(rank, alpha / rank)


_OF_BLOCKS = re.compile(
    r"(?:.*\.)?(?:attention\.(qkv|output)\.weight|ffn\.(input|output)\.weight|ffn\.\w+\.(w_in|w_out))"
)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: ``matrices`` with weight decay; ``vectors`` (biases and norms) without."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Parameters of experts have one more dimension, the expert.
            stacked = hasattr(parameter, "num_global_experts")
            (plain if parameter.dim() - stacked < 2 else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "matrices"},
        {"params": plain, "weight_decay": 0.0, "name": "vectors"},
    ]


def matrices_of_blocks(model: nn.Module, config: ModelSettings) -> dict[Tensor, tuple[int, int, int]]:
    """The trained matrices between the embeddings and the head, without routers.

    A parameter may be a stack of matrices with different tasks: of experts, of queries, keys and values, of the gate
    and the value of SwiGLU.

    Args:
        model: the model, or a part of it.

    Returns:
        for each parameter the number of its matrices, and the rows and columns of one; for a part of a sharded
        parameter those of the whole.
    """
    found: dict[Tensor, tuple[int, int, int]] = {}
    for name, parameter in model.named_parameters():
        match = _OF_BLOCKS.fullmatch(name)
        if match is None or not parameter.requires_grad:
            continue
        stacked = {"qkv": 3, "w_in": _inputs_per_unit(config)}.get(match[match.lastindex or 0], 1)
        *experts, rows, columns = getattr(parameter, "shard", parameter).shape
        found[parameter] = (math.prod(experts) * stacked, rows // stacked, columns)
    return found


def _inputs_per_unit(config: ModelSettings) -> int:
    return 1 if config.moe is None else ACTIVATIONS[config.moe_config().activation].inputs_per_unit
