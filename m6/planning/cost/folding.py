"""The model as a few distinct blocks with counts. The cost of planning then does not depend on the depth.

Equal subgraphs are folded into one with a count, as in TAP (arXiv 2302.00247), section 4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from m6.architecture.settings import ModelSettings
from m6.architecture.sharing import Sharing
from m6.model.blocks import M6Block
from m6.model.embeddings import M6Embeddings
from m6.model.parameters import matrices_of_blocks
from m6.planning.cost.layout import ParallelLayout
from m6.training.reduction.messages import GradientTensor

Shape = tuple[int, ...]
BlockType = Literal["embeddings", "dense", "sparse", "norm"]


@dataclass(frozen=True)
class Block:
    """The parameters of one block, with all experts.

    Attributes:
        type: the kind of block; ``norm`` is the last norm with the output layer.
        shapes: of every parameter, in the module's order.
        experts: indices in ``shapes`` of stacks of experts [E, ...].
        buffer_bytes: bytes of the module's buffers.
        frozen: indices in ``shapes`` of parameters without gradients.
        matrices: (index in ``shapes``, number, rows, columns) of the matrices updated by Muon.
    """

    type: BlockType
    shapes: tuple[Shape, ...]
    experts: frozenset[int] = frozenset()
    buffer_bytes: int = 0
    frozen: frozenset[int] = frozenset()
    matrices: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def numel(self) -> int:
        """Parameters of the block."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, eq=False)
class UniqueLayers:
    """Distinct blocks, how often each is computed, and how often its weights are stored.

    Attributes:
        blocks: (block, times computed, times stored). The counts differ in the Pseudo phase of M6-10T (arXiv
            2110.03888), where layers share weights. If layers share only some of their weights, the others are a
            second entry with 0 computations.
        sharing: what the layers share in the Pseudo phase; None: nothing.
    """

    config: ModelSettings
    blocks: tuple[tuple[Block, int, int], ...]
    sharing: Sharing | None = None

    @property
    def num_parameters(self) -> int:
        """Number of stored parameters."""
        return sum(block.numel * stored for block, _, stored in self.blocks)

    @property
    def num_layers(self) -> int:
        """Layers of the whole model. Taken from the list, since reading transformers' configuration is slow and a
        search asks often."""
        return len(self.is_sparse)

    @cached_property
    def is_sparse(self) -> list[bool]:
        """Whether each layer has experts."""
        return [self.config.is_moe_layer(layer) for layer in range(self.config.num_layers)]

    def part(self, layers: Collection[int]) -> UniqueLayers:
        """The part of the model on a rank with these layers.

        The embeddings belong to the first layer, the last norm to the last one. Of a group of layers with shared
        weights ``layers`` has all or none.
        """
        held = stored = self._counts(layers)
        if self.sharing is not None:
            firsts = self._counts({self.sharing.first_layer(layer) for layer in layers})
            stored = {**firsts, "norm": held["norm"]}
        blocks = (
            (block, held[block.type], stored[block.type]) if computed else (block, 0, held[block.type])
            for block, computed, _ in self.blocks
            if held[block.type]
        )
        return UniqueLayers(self.config, tuple(blocks), self.sharing)

    def without_sharing(self) -> UniqueLayers:
        """The same model without shared weights."""
        blocks = ((block, computed, max(computed, stored)) for block, computed, stored in self.blocks)
        return UniqueLayers(self.config, tuple(blocks))

    def _counts(self, layers: Collection[int]) -> dict[BlockType, int]:
        """Number of blocks of each type in these layers."""
        sparse = sum(map(self.is_sparse.__getitem__, layers))
        return {
            "embeddings": int(0 in layers),
            "dense": len(layers) - sparse,
            "sparse": sparse,
            "norm": int(self.num_layers - 1 in layers),
        }


def fold(config: ModelSettings, sharing: Sharing | None = None) -> UniqueLayers:
    """Builds each distinct block once, on the meta device.

    Args:
        config: the model.
        sharing: what the layers share in the Pseudo phase; None: nothing.
    """
    blocks: list[tuple[Block, int, int]] = []
    # On the meta device modules have shapes and no memory: a layer of the 10T model is 400 GB.
    with torch.device("meta"):
        blocks.append((_block("embeddings", M6Embeddings(config), config), 1, 1))
        layer_types: tuple[tuple[BlockType, bool], ...] = (("dense", False), ("sparse", True))
        for layer_type, sparse in layer_types:
            layers = [layer for layer in range(config.num_layers) if config.is_moe_layer(layer) == sparse]
            if layers:
                blocks += _layers(layer_type, M6Block(config, layers[0]), layers, config, sharing)
        blocks.append((_block("norm", nn.LayerNorm(config.hidden_size), config), 1, 1))
    return UniqueLayers(config, tuple(blocks), sharing)


def _layers(
    block_type: BlockType, layer: nn.Module, layers: list[int], config: ModelSettings, sharing: Sharing | None
) -> list[tuple[Block, int, int]]:
    """The entries of ``layers``. All of them are equal to ``layer``."""
    if sharing is None:
        return [(_block(block_type, layer, config), len(layers), len(layers))]
    firsts = sum(sharing.first_layer(index) == index for index in layers)
    shared = _block(block_type, layer, config, sharing.shares)
    rest = _block(block_type, layer, config, lambda name: not sharing.shares(name))
    return [(shared, len(layers), firsts), *([(rest, 0, len(layers))] if rest.shapes else [])]


def _block(
    block_type: BlockType,
    module: nn.Module,
    config: ModelSettings,
    includes: Callable[[str], bool] = lambda name: True,
) -> Block:
    """The parameters of ``module`` with names accepted by ``includes``."""
    parameters = [parameter for name, parameter in module.named_parameters() if includes(name)]
    of_blocks = matrices_of_blocks(module, config)
    return Block(
        block_type,
        tuple(tuple(parameter.shape) for parameter in parameters),
        frozenset(index for index, parameter in enumerate(parameters) if hasattr(parameter, "num_global_experts")),
        sum(buffer.nbytes for buffer in module.buffers()),
        frozenset(index for index, parameter in enumerate(parameters) if not parameter.requires_grad),
        tuple((index, *of_blocks[parameter]) for index, parameter in enumerate(parameters) if parameter in of_blocks),
    )


def shared_gradients(model: UniqueLayers, layout: ParallelLayout) -> list[GradientTensor]:
    """The gradients common to all ranks. Experts are among them only if they are neither split nor streamed."""
    return gradient_tensors(model, with_experts=layout.ep_size == 1 and not layout.stream_experts)


@functools.cache  # a search asks for those of every layout
def gradient_tensors(model: UniqueLayers, with_experts: bool) -> list[GradientTensor]:
    """The gradients of a model, in the order of its blocks."""
    config = model.config
    found = []
    for block, _, stored in model.blocks:
        numbers = [0]
        if block.type in ("dense", "sparse"):
            of_type = [
                layer for layer in range(config.num_layers) if config.is_moe_layer(layer) == (block.type == "sparse")
            ]
            numbers = [1 + layer for layer in of_type[:stored]]
        for index, shape in enumerate(block.shapes):
            is_stack = index in block.experts
            if index not in block.frozen and (with_experts or not is_stack):
                found += [GradientTensor(shape, number, is_stack) for number in numbers]
    return found
