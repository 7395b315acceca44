"""Tensor parallelism: layers whose matrices are sharded over the ranks of a tensor group, see ``m6.model.placements``.

Hidden states between layers are replicated; with sequence parallelism (arXiv 2205.05198) each rank has a part of the
tokens. The dense feed-forward may have any placement. Attention and shared experts always have the one-dimensional one:
heads and hidden units are sharded. The rows of the token embedding, which is the head's matrix, are divided too. Tokens
of routed experts are divided over the ranks, see ``moe.expert_parallel``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from m6.architecture.communication_volume import PlacementName
from m6.architecture.settings import ModelSettings
from m6.model.attention import StateLayout
from m6.model.blocks import DenseFFN, M6Block
from m6.model.embeddings import M6Embeddings
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.outputs import Head, log_sums, losses_by_codebook
from m6.model.placements import BY_NAME, OF_TOKENS, ONE, Division, Grid, OwnGroup, Placement, ProductPlacement, Shard
from moe.activations import ACTIVATIONS
from moe.autograd import custom_gradient, same
from moe.experts import SharedExperts


def divide_layers(
    model: M6ForConditionalGeneration,
    config: ModelSettings,
    placement: PlacementName,
    groups: Sequence[Sequence[int]],
    rank: int,
    own_group: OwnGroup,
    sequence_parallel: bool = False,
) -> None:
    """Replaces feed-forwards, shared experts, projections of attention, and the token embedding by this rank's shards.

    Names of parameters stay. A sharded parameter has the attribute ``shard``, see ``Shard``, also after ``to_empty``.

    Args:
        model: on the meta device.
        groups: the global ranks of all tensor groups.
        rank: the global rank of this process.
        own_group: see ``OwnGroup``.
        sequence_parallel: divide the tokens between matmuls; only with placement "1d".
    """
    one = OF_TOKENS if sequence_parallel else ONE
    of_ffns = one if placement == one.name else BY_NAME[placement]
    of_attention = of_ffn = one.grid(groups, rank, own_group)
    if placement != one.name:
        of_ffn = of_ffns.grid(groups, rank, own_group)
    parts: dict[nn.Module, Any] = {}

    def part_of(whole: nn.Module, kind: Callable[..., nn.Module], *arguments: Any) -> Any:
        """Makes the part of a module once: what layers share, they share afterwards."""
        if whole not in parts:
            parts[whole] = kind(whole, *arguments)
            parts[parts[whole]] = parts[whole]
        return parts[whole]

    model.head = DividedHead(of_attention)
    if isinstance(model.model.embeddings, M6Embeddings):  # only the first stage of a pipeline has them
        embeddings: Any = model.model.embeddings
        embeddings.tokens = ShardedEmbedding(embeddings.tokens, of_attention)
    blocks = [module for module in model.modules() if isinstance(module, M6Block)]
    for block in blocks:
        attention, ffn = block.attention, block.ffn
        attention.num_heads = config.num_attention_heads // of_attention.num_ranks
        attention.qkv = part_of(attention.qkv, ShardedLinear, one.first, of_attention, 3)
        attention.output = part_of(attention.output, ShardedLinear, one.second, of_attention)
        if isinstance(ffn, DenseFFN):
            inner = part_of(ffn.input, ShardedLinear, of_ffns.first, of_ffn)
            outer = part_of(ffn.output, ShardedLinear, of_ffns.second, of_ffn)
            block.ffn = DividedFFN(inner, outer, of_ffns, of_ffn)
        elif ffn.shared is not None:
            ffn.shared = part_of(ffn.shared, DividedSharedExperts, of_attention)
    if not sequence_parallel:
        return
    layout = model.model.layout = SequenceParts(of_attention)
    for block in blocks:
        block.layout = block.attention.layout = layout
        block.attention_norm = part_of(block.attention_norm, PartLayerNorm, of_attention)
        block.ffn_norm = part_of(block.ffn_norm, PartLayerNorm, of_attention)


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


class ShardedLinear(_Divided):
    """This rank's part of a linear layer: the transpose of its block of the weight, and its part of the bias.

    In 2-D and 3-D each rank has the whole bias.

    Args:
        linear: the whole layer, on the meta device.
        stacked: the weight is a stack of so many matrices, each sharded by itself.
    """

    def __init__(self, linear: nn.Linear, product: ProductPlacement, grid: Grid, stacked: int = 1) -> None:
        super().__init__()
        self._product, self._grid, self._stacked = product, grid, stacked
        # In one dimension with divided tokens each rank adds the bias to its own.
        self._sums_bias = len(grid.shape) == 1 and bool(product.outputs.rows)
        weight = Shard(tuple(linear.weight.shape), grid, self._of_weight)
        self.shards = {"weight": weight}
        # [inputs, stacked, outputs of one] -> [inputs, outputs].
        self.weight = nn.Parameter(
            weight.of(linear.weight.detach()).flatten(1).clone(memory_format=torch.contiguous_format)
        )
        self.bias = nn.Parameter(linear.bias.detach().clone())
        if len(grid.shape) == 1 and product.outputs.columns:
            self.shards["bias"] = bias = Shard(tuple(linear.bias.shape), grid, self._of_bias)
            self.bias = nn.Parameter(bias.of(linear.bias.detach()).flatten().clone())
        self._mark()

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps this rank's part of the inputs, [..., P], to its part of the outputs, [..., Q]."""
        outputs = self._product(inputs.flatten(0, -2), self.weight, self._grid)
        bias: Tensor = self.bias
        shape = inputs.shape[:-1]
        if len(outputs) != shape.numel():  # of all tokens, or of this rank's
            shape = torch.Size((1, len(outputs)))
        if self._sums_bias:
            bias = custom_gradient(bias, same, self._grid.sum)
        elif len(self._grid.shape) > 1:
            # The part for this rank's columns; the gradient is the sum over all rows.
            bias = custom_gradient(bias, self._part_of_bias, self._sum_of_parts)
        return (outputs + bias.to(outputs.dtype)).unflatten(0, shape)

    def _part_of_bias(self, bias: Tensor) -> Tensor:
        return self._columns.part(bias[None], self._grid)[0].clone()

    def _sum_of_parts(self, part: Tensor) -> Tensor:
        whole = part.new_zeros(1, len(self.bias))
        self._columns.part(whole, self._grid)[0].copy_(part)
        return self._grid.sum(whole)[0]

    @property
    def _columns(self) -> Division:
        return Division(columns=self._product.outputs.columns)

    def _of_weight(self, whole: Tensor, place: int) -> Tensor:
        parts = whole.unflatten(0, (self._stacked, -1)).transpose(1, 2)
        return self._product.matrix.part(parts, self._grid, place).transpose(0, 1)

    def _of_bias(self, whole: Tensor, place: int) -> Tensor:
        return self._product.outputs.part(whole.unflatten(0, (self._stacked, 1, -1)), self._grid, place)


class SequenceParts(StateLayout):
    """A contiguous part of the tokens of a micro-batch on each rank: [1, T / P, D].

    The tokens of all rows are one list, padded with zeros to a multiple of P. Norms, dropout and the residual stream
    then take 1 / P of their memory, and hidden states 1 / P of the messages between pipeline stages.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def shape(self, rows: int, length: int) -> tuple[int, ...]:
        """See ``StateLayout.shape``."""
        return 1, -(-rows * length // self._grid.num_ranks)

    def divided(self, hidden_states: Tensor) -> Tensor:
        """See ``StateLayout.divided``; the backward pass gathers the gradients of all parts."""
        shape = hidden_states.shape[:2]
        return custom_gradient(hidden_states, self._own, lambda gradient: self._gathered(gradient, *shape))

    def whole(self, hidden_states: Tensor, rows: int, length: int) -> Tensor:
        """See ``StateLayout.whole``."""
        return custom_gradient(hidden_states, lambda part: self._gathered(part, rows, length), self._own)

    def dropout(self, module: nn.Dropout, hidden_states: Tensor, rows: int, length: int) -> Tensor:
        """See ``StateLayout.dropout``; the same numbers are dropped as in whole hidden states."""
        if not module.training or not module.p:
            return hidden_states
        kept = self._own(module(hidden_states.new_ones(rows, length, hidden_states.shape[-1])) != 0)
        # The factor of 16-bit numbers is not rounded to 16 bits, as in PyTorch's dropout on GPUs.
        return torch.where(kept, hidden_states * (0.0 if module.p == 1 else 1 / (1 - module.p)), 0.0)

    def of_tokens(self, projected: Tensor, rows: int, length: int) -> Tensor:
        """See ``StateLayout.of_tokens``."""
        return projected[0, : rows * length].unflatten(0, (rows, length))

    def for_parts(self, attended: Tensor) -> Tensor:
        """See ``StateLayout.for_parts``."""
        return self._padded(attended)

    def _padded(self, states: Tensor) -> Tensor:
        tokens = states.flatten(0, 1)
        return F.pad(tokens, (0, 0, 0, -len(tokens) % self._grid.num_ranks)).unsqueeze(0)

    def _own(self, states: Tensor) -> Tensor:
        return self._padded(states).chunk(self._grid.num_ranks, dim=1)[self._grid.place].clone()

    def _gathered(self, part: Tensor, rows: int, length: int) -> Tensor:
        return self._grid.gather(part[0])[: rows * length].unflatten(0, (rows, length))


class PartLayerNorm(nn.LayerNorm):
    """A layer norm of this rank's tokens. The gradients of its parameters are summed over the ranks."""

    def __init__(self, whole: nn.LayerNorm, grid: Grid) -> None:
        super().__init__(whole.normalized_shape, eps=whole.eps, device="meta")
        self.weight, self.bias, self._grid = whole.weight, whole.bias, grid

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., D] to [..., D]."""
        weight, bias = (custom_gradient(each, same, self._grid.sum) for each in (self.weight, self.bias))
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class ShardedEmbedding(_Divided):
    """This rank's rows of the token embedding.

    Of P ranks rank p has the rows p, p + P, p + 2 P, ...: so texts and each codebook of images are even up to one
    row, and the size of the vocabulary need not be a multiple of P.

    Args:
        whole: on the meta device.
        grid: of one axis.
    """

    def __init__(self, whole: nn.Embedding, grid: Grid) -> None:
        super().__init__()
        self._grid = grid
        shard = Shard(tuple(whole.weight.shape), grid, lambda rows, place: rows[place :: grid.num_ranks])
        self.shards = {"weight": shard}
        self.weight = nn.Parameter(shard.of(whole.weight.detach()).clone(memory_format=torch.contiguous_format))
        self._mark()

    def forward(self, ids: Tensor) -> Tensor:
        """Maps int64 [...] to [..., D], replicated on all ranks."""
        is_own = ids % self._grid.num_ranks == self._grid.place
        found = F.embedding(torch.where(is_own, ids // self._grid.num_ranks, 0), self.weight)
        # Later computation is replicated, so each rank already has the gradient of its rows.
        return custom_gradient(found * is_own.unsqueeze(-1), self._grid.sum, same)


class DividedHead(Head):
    """The head with the rows of ``ShardedEmbedding``: no rank has the logits of the whole vocabulary.

    Ranks exchange two numbers of each target, as in Megatron-LM (arXiv 1909.08053, section 3): the sum of exponentials
    of their logits, as a logarithm, and the logit of the target.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def rows(self, config: ModelSettings) -> int:
        """See ``Head.rows``."""
        return len(self._own(slice(0, config.vocab_size)))

    def logits(self, hidden_states: Tensor, table: Tensor, config: ModelSettings) -> Tensor:
        """See ``Head.logits``; all ranks have the same ``hidden_states``."""
        states = custom_gradient(hidden_states, same, self._grid.sum)
        ranks, place = self._grid.num_ranks, self._grid.place

        def interleaved(own: Tensor) -> Tensor:
            padded = F.pad(own, (0, -(-config.vocab_size // ranks) - own.shape[-1])).flatten(0, -2)
            columns = self._grid.gather(padded).unflatten(0, (ranks, -1))
            return columns.permute(1, 2, 0).flatten(1)[:, : config.vocab_size].unflatten(0, own.shape[:-1])

        # Later computation is replicated, so each rank already has the gradient of its columns.
        return custom_gradient(
            F.linear(states, table), interleaved, lambda gradient: gradient[..., place::ranks].contiguous()
        )

    def losses(self, hidden_states: Tensor, table: Tensor, targets: Tensor, config: ModelSettings) -> Tensor:
        """See ``Head.losses``; ``hidden_states`` and ``targets`` are equal on all ranks."""
        states = custom_gradient(hidden_states, same, self._grid.sum)

        def losses_of(rows: Tensor | slice, tokens: slice) -> Tensor:
            own, wanted = self._own(tokens), targets[rows]
            logits = F.linear(states[rows], table[own.start : own.stop])
            is_own = wanted % self._grid.num_ranks == self._grid.place
            column = torch.where(is_own, wanted // self._grid.num_ranks - own.start, 0)
            of_targets = torch.zeros_like(log := log_sums(logits))
            if len(own):
                of_targets = logits.gather(1, column.unsqueeze(1)).squeeze(1).to(log.dtype) * is_own
            return self._log_sum(log) - custom_gradient(of_targets, self._grid.sum, same)

        return losses_by_codebook(targets, config, losses_of)

    def _own(self, tokens: slice) -> range:
        """The places of this rank's rows among its rows of a range of tokens."""
        first, last = (-((self._grid.place - bound) // self._grid.num_ranks) for bound in (tokens.start, tokens.stop))
        return range(first, last)

    def _log_sum(self, own: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials [N] over the rows of all ranks, from those of this rank."""
        whole = self._grid.gather(own.detach().unsqueeze(0)).logsumexp(0)
        return custom_gradient(own, lambda _: whole, lambda gradient: gradient * (own.detach() - whole).exp())


class DividedFFN(DenseFFN):
    """A dense feed-forward with sharded matrices."""

    input: ShardedLinear  # type: ignore[assignment]
    output: ShardedLinear  # type: ignore[assignment]

    def __init__(self, inner: ShardedLinear, outer: ShardedLinear, placement: Placement, grid: Grid) -> None:
        nn.Module.__init__(self)
        self._placement, self._grid = placement, grid
        self.input, self.output = inner, outer

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps [..., D] to [..., D]: replicated on all ranks, or this rank's part of the tokens."""
        grid, inputs, outputs = self._grid, self._placement.first.inputs, self._placement.second.outputs
        if len(grid.shape) == 1:
            return super().forward(hidden_states)
        tokens = hidden_states.flatten(0, -2)
        # Pad with rows of zeros to a multiple of the blocks.
        blocks = math.prod(grid.shape[axis] for axis in inputs.rows)
        padded = F.pad(tokens, (0, 0, 0, -len(tokens) % blocks))
        own = custom_gradient(
            padded, lambda whole: inputs.part(whole, grid).contiguous(), lambda part: inputs.whole(part, grid)
        )
        # Later computation is replicated, so each rank already has the gradient of its part.
        whole = custom_gradient(
            super().forward(own),
            lambda part: outputs.whole(part, grid),
            lambda whole: outputs.part(whole, grid).contiguous(),
        )
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
                self.shards[name] = Shard(tuple(parameter.shape), grid, of)
                part = self.shards[name].of(part)
            if name.endswith("_in"):  # [stacked, outputs of one, ...] -> [outputs, ...]
                part = part.flatten(0, 1)
            self.register_parameter(name, nn.Parameter(part.clone(memory_format=torch.contiguous_format)))
        self._mark()

    def _inner(self, tokens: Tensor) -> Tensor:
        # All ranks have the tokens, and each computes a part of the outputs.
        return super()._inner(custom_gradient(tokens, same, self._grid.sum))

    def _outer(self, hidden: Tensor) -> Tensor:
        # All ranks compute the same from the sum, so each already has its gradient.
        output = custom_gradient(F.linear(hidden, self.w_out), self._grid.sum, same)
        return output if self.b_out is None else output + self.b_out.to(output.dtype)

    def _of_inputs(self, whole: Tensor, place: int) -> Tensor:
        return whole.unflatten(0, (self._stacked, self._grid.num_ranks, -1)).select(1, place)

    def _of_outputs(self, whole: Tensor, place: int) -> Tensor:
        return whole.unflatten(1, (self._grid.num_ranks, -1)).select(1, place)
