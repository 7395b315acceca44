"""The optimizer's parameter groups."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor, nn

from m6.architecture.settings import ModelSettings
from moe.activations import ACTIVATIONS

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
        for each parameter the number of its matrices, and the rows and columns of one.
    """
    found: dict[Tensor, tuple[int, int, int]] = {}
    for name, parameter in model.named_parameters():
        match = _OF_BLOCKS.fullmatch(name)
        if match is None or not parameter.requires_grad:
            continue
        stacked = {"qkv": 3, "w_in": _inputs_per_unit(config)}.get(match[match.lastindex or 0], 1)
        *experts, rows, columns = parameter.shape
        found[parameter] = (math.prod(experts) * stacked, rows // stacked, columns)
    return found


def _inputs_per_unit(config: ModelSettings) -> int:
    return 1 if config.moe is None else ACTIVATIONS[config.moe_config().activation].inputs_per_unit
