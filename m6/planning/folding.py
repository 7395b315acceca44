"""The model as a few distinct blocks with counts, so that planning costs the same at any depth.

Repeated subgraphs are found once and counted: TAP (arXiv 2302.00247), section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from m6.model.configuration import M6Config
from m6.model.embeddings import M6Embeddings
from m6.model.modeling import M6Block

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
            2110.03888), in which all layers of a kind share one layer's weights.
    """

    config: M6Config
    blocks: tuple[tuple[Block, int, int], ...]

    @property
    def num_parameters(self) -> int:
        """Stored parameters."""
        return sum(block.numel * stored for block, _, stored in self.blocks)


def fold(config: M6Config, pseudo: bool = False) -> FoldedModel:
    """Builds each distinct block once, on the meta device.

    Args:
        config: the model.
        pseudo: the layers of a kind share one layer's weights.
    """
    layers = [config.is_moe_layer(index) for index in range(config.num_layers)]
    with torch.device("meta"):
        blocks = [(_block("embeddings", M6Embeddings(config)), 1, 1)]
        for kind, sparse in (("dense", False), ("sparse", True)):
            if (count := layers.count(sparse)) > 0:
                block = _block(kind, M6Block(config, layers.index(sparse)))  # type: ignore[arg-type]
                blocks.append((block, count, 1 if pseudo else count))
        blocks.append((_block("norm", nn.LayerNorm(config.hidden_size)), 1, 1))
    return FoldedModel(config, tuple(blocks))


def _block(kind: Kind, module: nn.Module) -> Block:
    parameters = list(module.parameters())
    return Block(
        kind,
        tuple(tuple(parameter.shape) for parameter in parameters),
        frozenset(index for index, parameter in enumerate(parameters) if hasattr(parameter, "num_global_experts")),
        sum(buffer.nbytes for buffer in module.buffers()),
        frozenset(index for index, parameter in enumerate(parameters) if not parameter.requires_grad),
    )
