"""Layers with matrices sharded over the ranks of a tensor group. Hidden states between layers are replicated.

The dense feed-forward may have any placement. Attention always has the one-dimensional one: its heads are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from m6.architecture.received import PlacementName
from m6.architecture.settings import ModelSettings
from m6.model.blocks import DenseFFN, M6Block
from m6.model.tensor.grid import Grid, OwnGroup
from m6.model.tensor.placement import BY_NAME, Division, Placement, ProductPlacement, Shard

_ATTENTION = BY_NAME["1d"]


def divide_layers(
    model: nn.Module,
    config: ModelSettings,
    placement: PlacementName,
    groups: Sequence[Sequence[int]],
    rank: int,
    own_group: OwnGroup,
) -> None:
    """Replaces the dense feed-forwards and the projections of attention by this rank's shards, in place.

    Names of parameters stay. A sharded parameter has the attribute ``shard``, see ``Shard``, also after ``to_empty``.

    Args:
        model: on the meta device.
        groups: the global ranks of all tensor groups.
        rank: the global rank of this process.
        own_group: see ``OwnGroup``.
    """
    of_attention = of_ffn = _ATTENTION.grid(groups, rank, own_group)
    if placement != _ATTENTION.name:
        of_ffn = BY_NAME[placement].grid(groups, rank, own_group)
    for block in [module for module in model.modules() if isinstance(module, M6Block)]:
        attention = block.attention
        attention.num_heads //= of_attention.num_ranks
        attention.qkv = DividedLinear(attention.qkv, _ATTENTION.first, of_attention, stacked=3)  # type: ignore[assignment]
        attention.output = DividedLinear(attention.output, _ATTENTION.second, of_attention)  # type: ignore[assignment]
        block.ffn = DividedFFN(config, BY_NAME[placement], of_ffn)


class DividedLinear(nn.Module):
    """This rank's part of a linear layer: the transpose of its block of the weight, and its part of the bias.

    In 2-D and 3-D each rank has the whole bias.

    Args:
        linear: the whole layer, on the meta device.
        stacked: the weight is a stack of so many matrices, each sharded by itself.
    """

    def __init__(self, linear: nn.Linear, product: ProductPlacement, grid: Grid, stacked: int = 1) -> None:
        super().__init__()
        self._product, self._grid, self._stacked = product, grid, stacked
        weight = Shard(tuple(linear.weight.shape), self._of_weight)
        self.shards = {"weight": weight}
        # [inputs, stacked, outputs of one] -> [inputs, outputs].
        self.weight = nn.Parameter(
            weight.of(linear.weight.detach()).flatten(1).clone(memory_format=torch.contiguous_format)
        )
        self.bias = nn.Parameter(linear.bias.detach().clone())
        if len(grid.shape) == 1 and product.outputs.columns:
            self.shards["bias"] = Shard(tuple(linear.bias.shape), self._of_bias)
            self.bias = nn.Parameter(self._of_bias(linear.bias.detach()).flatten().clone())
        self._mark()

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps this rank's part of the inputs, [..., P], to its part of the outputs, [..., Q]."""
        outputs = self._product(inputs.flatten(0, -2), self.weight, self._grid)
        bias = self.bias
        if len(self._grid.shape) > 1:
            bias = _PartOfBias.apply(bias, self._product.outputs, self._grid)
        return (outputs + bias.to(outputs.dtype)).unflatten(0, inputs.shape[:-1])

    def _of_weight(self, whole: Tensor) -> Tensor:
        parts = whole.unflatten(0, (self._stacked, -1)).transpose(1, 2)
        return self._product.matrix.part(parts, self._grid).transpose(0, 1)

    def _of_bias(self, whole: Tensor) -> Tensor:
        return self._product.outputs.part(whole.unflatten(0, (self._stacked, 1, -1)), self._grid)

    def _mark(self) -> None:
        for name, shard in self.shards.items():
            parameter: Any = getattr(self, name)
            parameter.shard = shard
            parameter.tensor_model_parallel = True  # DeepSpeed then counts it on each rank for the norm

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DividedLinear:
        super()._apply(fn, recurse)
        self._mark()  # to_empty makes new parameters
        return self


class DividedFFN(DenseFFN):
    """A dense feed-forward with sharded matrices."""

    def __init__(self, config: ModelSettings, placement: Placement, grid: Grid) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self._placement, self._grid = placement, grid
        self.input = DividedLinear(self.input, placement.first, grid)  # type: ignore[assignment]
        self.output = DividedLinear(self.output, placement.second, grid)  # type: ignore[assignment]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps [..., D] to [..., D], replicated on all ranks."""
        inputs = self._placement.first.inputs
        if not inputs.rows:
            return super().forward(hidden_states)
        tokens = hidden_states.flatten(0, -2)
        # Pad with rows of zeros to a multiple of the blocks.
        blocks = math.prod(self._grid.shape[axis] for axis in inputs.rows)
        padded = F.pad(tokens, (0, 0, 0, -len(tokens) % blocks))
        part = super().forward(_Part.apply(padded, inputs, self._grid))
        whole = _Whole.apply(part, self._placement.second.outputs, self._grid)
        return whole[: len(tokens)].view_as(hidden_states)


class _Part(torch.autograd.Function):
    """This rank's part of a replicated matrix. The backward pass gathers the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, division: Division, grid: Grid) -> Tensor:
        ctx.division, ctx.grid = division, grid
        return division.part(whole, grid).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.division.whole(grads[0], ctx.grid), None, None


class _Whole(torch.autograd.Function):
    """The matrix of all parts. Later computation is replicated, so each rank already has the gradient of its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, division: Division, grid: Grid) -> Tensor:
        ctx.division, ctx.grid = division, grid
        return division.whole(part, grid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.division.part(grads[0], ctx.grid).contiguous(), None, None


class _PartOfBias(torch.autograd.Function):
    """The part of a bias for this rank's columns; the gradient is the sum over all rows."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, outputs: Division, grid: Grid) -> Tensor:
        ctx.columns, ctx.grid, ctx.size = Division(columns=outputs.columns), grid, len(bias)
        return ctx.columns.part(bias[None], grid)[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        whole = grads[0].new_zeros(1, ctx.size)
        ctx.columns.part(whole, ctx.grid)[0].copy_(grads[0])
        return ctx.grid.sum(whole)[0], None, None
