"""Layers with matrices sharded over the ranks of a tensor group. Hidden states between layers are replicated.

The dense feed-forward may have any placement. Attention and shared experts always have the one-dimensional one: heads
and hidden units are sharded. Tokens of routed experts are divided over the ranks, see ``moe.shared_tokens``.
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
from m6.model.tensor.placement import BY_NAME, Division, Grid, OwnGroup, Placement, ProductPlacement, Shard
from moe.activations import ACTIVATIONS
from moe.experts import SharedExperts

_ATTENTION = BY_NAME["1d"]


def divide_layers(
    model: nn.Module,
    config: ModelSettings,
    placement: PlacementName,
    groups: Sequence[Sequence[int]],
    rank: int,
    own_group: OwnGroup,
) -> None:
    """Replaces dense feed-forwards, shared experts and the projections of attention by this rank's shards, in place.

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
    first, second = BY_NAME[placement].first, BY_NAME[placement].second
    parts: dict[nn.Module, Any] = {}  # what layers share, they share afterwards

    def part_of(linear: nn.Linear, product: ProductPlacement, grid: Grid, stacked: int = 1) -> Any:
        if linear not in parts:
            parts[linear] = DividedLinear(linear, product, grid, stacked)
            parts[parts[linear]] = parts[linear]
        return parts[linear]

    for block in [module for module in model.modules() if isinstance(module, M6Block)]:
        attention, ffn = block.attention, block.ffn
        attention.num_heads = config.num_attention_heads // of_attention.num_ranks
        attention.qkv = part_of(attention.qkv, _ATTENTION.first, of_attention, stacked=3)
        attention.output = part_of(attention.output, _ATTENTION.second, of_attention)
        if isinstance(ffn, DenseFFN):
            inner, outer = part_of(ffn.input, first, of_ffn), part_of(ffn.output, second, of_ffn)
            block.ffn = DividedFFN(inner, outer, BY_NAME[placement], of_ffn)
        elif ffn.shared is not None:
            if ffn.shared not in parts:
                parts[ffn.shared] = DividedSharedExperts(ffn.shared, of_attention)
            ffn.shared = parts[ffn.shared]


class _Divided(nn.Module):
    """A module with parts of parameters.

    Attributes:
        shards: of parameters, by name.
    """

    shards: dict[str, Shard]

    def _mark(self) -> None:
        for name, shard in self.shards.items():
            parameter: Any = getattr(self, name)
            parameter.shard = shard
            parameter.tensor_model_parallel = True  # DeepSpeed then counts it on each rank for the norm

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Divided:
        super()._apply(fn, recurse)
        self._mark()  # to_empty makes new parameters
        return self


class DividedLinear(_Divided):
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


class DividedFFN(DenseFFN):
    """A dense feed-forward with sharded matrices."""

    input: DividedLinear  # type: ignore[assignment]
    output: DividedLinear  # type: ignore[assignment]

    def __init__(self, inner: DividedLinear, outer: DividedLinear, placement: Placement, grid: Grid) -> None:
        nn.Module.__init__(self)
        self._placement, self._grid = placement, grid
        self.input, self.output = inner, outer

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


class DividedSharedExperts(_Divided, SharedExperts):
    """This rank's hidden units of shared experts. Their gate and their output bias are whole on each rank.

    Args:
        whole: on the meta device.
        grid: of one axis.
    """

    def __init__(self, whole: SharedExperts, grid: Grid) -> None:
        nn.Module.__init__(self)
        self.config, self._grid = whole.config, grid
        self._stacked = ACTIVATIONS[whole.config.activation].inputs_per_unit
        self.shards = {}
        for name in ("w_in", "w_out", "b_in", "b_out", "w_gate"):  # the order of the whole module
            parameter = getattr(whole, name)
            if parameter is None:
                self.register_parameter(name, None)
                continue
            of = {"w_in": self._of_inputs, "b_in": self._of_inputs, "w_out": self._of_outputs}.get(name)
            part = parameter.detach()
            if of is not None:
                self.shards[name] = Shard(tuple(parameter.shape), of)
                part = of(part)
            if name.endswith("_in"):  # [stacked, outputs of one, ...] -> [outputs, ...]
                part = part.flatten(0, 1)
            self.register_parameter(name, nn.Parameter(part.clone(memory_format=torch.contiguous_format)))
        self._mark()

    def _inner(self, tokens: Tensor) -> Tensor:
        return super()._inner(_Shared.apply(tokens, self._grid))

    def _outer(self, hidden: Tensor) -> Tensor:
        output: Tensor = _Sum.apply(F.linear(hidden, self.w_out), self._grid)
        return output if self.b_out is None else output + self.b_out.to(output.dtype)

    def _of_inputs(self, whole: Tensor) -> Tensor:
        return whole.unflatten(0, (self._stacked, self._grid.num_ranks, -1)).select(1, self._grid.place)

    def _of_outputs(self, whole: Tensor) -> Tensor:
        return whole.unflatten(1, (self._grid.num_ranks, -1)).select(1, self._grid.place)


class _Shared(torch.autograd.Function):
    """What all ranks have, and of which each computes a part of the outputs; the gradient is the sum."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.grid.sum(grads[0]), None


class _Sum(torch.autograd.Function):
    """The sum of what the ranks computed. All of them compute the same of it, so that each has its gradient already."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, grid: Grid) -> Tensor:
        return grid.sum(partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


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
