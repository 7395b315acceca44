"""The model as a few distinct blocks with counts, so that planning costs the same at any depth.

Repeated subgraphs are found once and counted: TAP (arXiv 2302.00247), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from m6.model.configuration import M6Config
from m6.model.embeddings import M6Embeddings
from m6.model.modeling import M6Block
from m6.model.sharing import Sharing

Shape = tuple[int, ...]
Kind = Literal["embeddings", "dense", "sparse", "norm"]


@dataclass(frozen=True)
class Block:
    """Parameters of one block, whole experts included.

    Attributes:
        kind: what the block computes.
        shapes: of every parameter, in the module's order.
        experts: the indices in ``shapes`` of stacks of experts, whose first dimension is the expert.
        buffer_bytes: of what is kept beside parameters.
    """

    kind: Kind
    shapes: tuple[Shape, ...]
    experts: frozenset[int] = frozenset()
    buffer_bytes: int = 0
    frozen: frozenset[int] = frozenset()
    """indices of parameters without gradients"""

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class FoldedModel:
    """Distinct blocks with how often each is computed, and how often its weights are stored.

    Attributes:
        blocks: (block, times computed, times stored); the last differs in the Pseudo stage of M6-10T (arXiv
            2110.03888), in which layers share weights. What they share only in part is in two entries, of which one
            is computed 0 times.
    """

    config: M6Config
    blocks: tuple[tuple[Block, int, int], ...]

    @property
    def num_parameters(self) -> int:
        """Stored parameters."""
        return sum(block.numel * stored for block, _, stored in self.blocks)

    def fullest_stage(self, stages: int) -> FoldedModel:
        """The first of ``stages`` pipeline stages: it has the embeddings, as the last, which needs them for its output,
        and as many layers as any."""
        if stages == 1:
            return self

        def share(block: Block, number: int) -> int:
            return math.ceil(number / stages) if block.kind in ("dense", "sparse") else number

        blocks = ((block, share(block, computed), share(block, stored)) for block, computed, stored in self.blocks)
        return FoldedModel(self.config, tuple(blocks))


def fold(config: M6Config, sharing: Sharing | None = None) -> FoldedModel:
    """Builds each distinct block once, on the meta device.

    Args:
        config: the model.
        sharing: what the layers share, for the Pseudo model.
    """
    blocks: list[tuple[Block, int, int]] = []
    with torch.device("meta"):
        blocks.append((_block("embeddings", M6Embeddings(config)), 1, 1))
        kinds: tuple[tuple[Kind, bool], ...] = (("dense", False), ("sparse", True))
        for kind, sparse in kinds:
            layers = [layer for layer in range(config.num_layers) if config.is_moe_layer(layer) == sparse]
            if layers:
                blocks += _layers(kind, M6Block(config, layers[0]), layers, sharing)
        blocks.append((_block("norm", nn.LayerNorm(config.hidden_size)), 1, 1))
    return FoldedModel(config, tuple(blocks))


def _layers(kind: Kind, layer: nn.Module, layers: list[int], sharing: Sharing | None) -> list[tuple[Block, int, int]]:
    """Entries for ``layers``, which are all like ``layer``."""
    if sharing is None:
        return [(_block(kind, layer), len(layers), len(layers))]
    firsts = sum(sharing.first_layer(index) == index for index in layers)
    shared = _block(kind, layer, sharing.shares)
    rest = _block(kind, layer, lambda name: not sharing.shares(name))
    return [(shared, len(layers), firsts), *([(rest, 0, len(layers))] if rest.shapes else [])]


def _block(kind: Kind, module: nn.Module, takes: Callable[[str], bool] = lambda name: True) -> Block:
    """The parameters of ``module`` whose names ``takes`` accepts."""
    parameters = [parameter for name, parameter in module.named_parameters() if takes(name)]
    return Block(
        kind,
        tuple(tuple(parameter.shape) for parameter in parameters),
        frozenset(index for index, parameter in enumerate(parameters) if hasattr(parameter, "num_global_experts")),
        sum(buffer.nbytes for buffer in module.buffers()),
        frozenset(index for index, parameter in enumerate(parameters) if not parameter.requires_grad),
    )
