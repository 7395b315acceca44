"""The number and sizes of the parameters of one rank, before ZeRO partitions them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from m6.planning.cost.folding import Shape, UniqueLayers
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.work import Matmul
from m6.training.optimizers import (
    ADAMW_MOMENTS,
    MUON_BATCH_ELEMENTS,
    ParameterGroup,
    groups_of,
    moment_bytes,
)
from m6.training.sizes import FP32
from offload.optimizer.settings import MUON_ITERATIONS

_MOMENTS_OF_MATRICES = {"AdamW": ADAMW_MOMENTS, "Lamb": ADAMW_MOMENTS, "Muon": 1, "Lars": 1}
"""Elements of state for each element of a matrix of a block, of the optimizers for parts of matrices."""
_MOMENTS_OF_TABLE = {**_MOMENTS_OF_MATRICES, "Muon": ADAMW_MOMENTS}
"""The same of the token embedding."""


@dataclass(frozen=True)
class MuonMatrices:
    """Equal matrices on one rank, before ZeRO partitions them.

    Attributes:
        number: how many.
        in_parameter: how many of them are in one parameter.
        rows, columns: of each.
        of_experts: whether they belong to experts with groups of ranks of their own.
        parts: ranks of a tensor group, each with a part of each parameter; each rank updates whole matrices.
    """

    number: int
    in_parameter: int
    rows: int
    columns: int
    of_experts: bool
    parts: int = 1

    @property
    def numel(self) -> int:
        """Elements of all of them on this rank."""
        return self.number * self.rows * self.columns // self.parts

    def products(self, dtype: str) -> list[Matmul]:
        """The products of one update of one matrix."""
        short, long = sorted((self.rows, self.columns))
        shapes = ((short, short, long), (short, short, short), (short, long, short))
        return [Matmul(m, n, k, dtype, MUON_ITERATIONS) for m, n, k in shapes]

    def temporaries(self, width: int) -> int:
        """Bytes of the largest batch's temporaries; ``width``: bytes of an element in products."""
        short, long = sorted((self.rows, self.columns))
        at_once = min(self.in_parameter, max(1, MUON_BATCH_ELEMENTS // (short * long)))
        # The normed matrix in fp32, before and after a product in ``width``, and two products of it with itself.
        products = at_once * (short * long * (FP32 + 2 * width) + 2 * short * short * width)
        # In tensor groups also the whole parameter, as it comes, in order and after the products.
        return products + (3 * self.in_parameter * short * long * FP32 if self.parts > 1 else 0)


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of one rank's trainable parameters.

    Attributes:
        matrices: in tensors of two or more dimensions, ``experts`` excluded.
        vectors: in tensors of one dimension.
        experts: in experts with groups of ranks of their own; 0 where every rank has the same parameters.
        frozen: parameters without gradients; no other field counts them.
        buffer_bytes: bytes of buffers.
        largest: the largest parameter.
        largest_module: the largest unit gathered at once by ZeRO stage 3: a parameter, or the experts of a layer.
        largest_update: the largest tensor of an update by Adafactor: a parameter, or one expert's part of it.
        sizes: (elements, how many) of the parameters, by size.
        dense_moments: bytes of optimizer state by optimizer type, of all but experts.
        expert_moments: the same of experts, split or not.
        muon: the matrices updated by Muon.
        table: shape of the token embedding, if it is trained here; otherwise (0, 0).
    """

    matrices: int
    vectors: int
    experts: int
    frozen: int
    buffer_bytes: int
    largest: int
    largest_module: int
    largest_update: int
    sizes: tuple[tuple[int, int], ...]
    dense_moments: dict[str, int]
    expert_moments: dict[str, int]
    muon: tuple[MuonMatrices, ...]
    table: tuple[int, int] = (0, 0)

    @property
    def local(self) -> int:
        """All trainable parameters of the rank."""
        return self.matrices + self.vectors + self.experts

    def groups(self, optimizer_type: str) -> list[ParameterGroup]:
        """The optimizer's non-empty parameter groups: with weight decay, without it, and ``experts``."""
        by_muon = sum(part.numel for part in self.muon if not part.of_experts)
        return groups_of(optimizer_type, self.matrices, self.vectors, by_muon, self.experts)

    def divided(self, layout: ParallelLayout) -> ParameterCounts:
        """The counts of one rank of a tensor group. Biases are counted whole, though 1-D divides some of them."""
        parts = layout.tp_size
        if parts == 1:
            return self
        if layout.placement != "megatron":
            muon = tuple(part if part.of_experts else replace(part, parts=parts) for part in self.muon)
            elsewhere = sum(part.numel for part in self.muon) - sum(part.numel for part in muon)
            rows, columns = self.table
            other_rows = (rows - math.ceil(rows / parts)) * columns
            moments = {
                name: num_bytes
                - (_MOMENTS_OF_MATRICES.get(name, 0) * elsewhere + _MOMENTS_OF_TABLE.get(name, 0) * other_rows) * FP32
                for name, num_bytes in self.dense_moments.items()
            }
            matrices = self.matrices - elsewhere - other_rows
            return replace(self, matrices=matrices, dense_moments=moments, muon=muon)
        names = ("matrices", "vectors", "experts", "largest", "largest_module", "largest_update")
        return replace(self, **{name: math.ceil(getattr(self, name) / parts) for name in names})

    def moments(self, optimizer_type: str) -> int:
        """Bytes of optimizer state without ZeRO's partitions."""
        return self.dense_moments[optimizer_type] + self.expert_moments[optimizer_type]

    def fixed(self, width: int) -> int:
        """Bytes of frozen parameters of ``width`` bytes, and of buffers."""
        return self.frozen * width + self.buffer_bytes

    def sharded(self, world: int) -> int:
        """Elements owned by a rank at ZeRO stage 3. Every parameter is padded by itself."""
        return sum(math.ceil(numel / world) * count for numel, count in self.sizes)

    def frozen_shard(self, world: int) -> int:
        """Elements of frozen parameters owned by a rank at ZeRO stage 3."""
        return math.ceil(self.frozen / world)

    def persistent(self, threshold: int) -> int:
        """Elements of parameters of at most ``threshold`` elements. ZeRO stage 3 keeps these gathered."""
        return sum(numel * count for numel, count in self.sizes if numel <= threshold)


def count_parameters(
    model: UniqueLayers, ep_size: int, with_experts: bool = True, tensor_groups: bool = False
) -> ParameterCounts:
    """Counts the parameters of one rank.

    Args:
        model: the model, or the fullest pipeline stage of it.
        ep_size: expert-parallel ranks.
        with_experts: False: the experts are elsewhere (``m6.offload``).
        tensor_groups: whether the ranks of tensor groups have the same experts, whose sums are over more ranks.
    """
    split = ep_size > 1 or tensor_groups
    matrices = vectors = experts = frozen = buffers = largest = largest_module = update = 0
    sizes: dict[int, int] = {}
    moments = {
        of_experts: dict.fromkeys(("AdamW", "Adafactor", "Muon", "Lamb", "Lars"), 0) for of_experts in (True, False)
    }
    muon: list[MuonMatrices] = []
    table, of_table = (0, 0), (model.config.vocab_size, model.config.hidden_size)
    for block, _, stored in model.blocks:
        buffers += block.buffer_bytes
        layer_experts = 0
        of_blocks = {index: matrices for index, *matrices in block.matrices}
        for index, shape in enumerate(block.shapes):
            is_expert = index in block.experts
            if is_expert and not with_experts:
                continue
            local: Shape = (shape[0] // ep_size, *shape[1:]) if is_expert else shape
            numel = math.prod(local)
            if index in block.frozen:
                frozen += numel
                continue
            if block.type == "embeddings" and shape == of_table:
                table = of_table
            layer_experts += numel if is_expert else 0
            largest = max(largest, numel)
            # Adafactor updates the experts of a stack one by one.
            update = max(update, math.prod(local[1:]) if is_expert else numel)
            sizes[numel] = sizes.get(numel, 0) + stored
            for optimizer_type, num_bytes in moments[is_expert].items():
                moments[is_expert][optimizer_type] = (
                    num_bytes + moment_bytes(local, optimizer_type, index in of_blocks) * stored
                )
            if index in of_blocks:
                number, rows, columns = of_blocks[index]
                number //= ep_size if is_expert else 1
                muon.append(MuonMatrices(number * stored, number, rows, columns, is_expert and split))
            if is_expert and split:
                experts += numel * stored
            elif len(local) > 1:  # weight decay is for matrices only: two parameter groups
                matrices += numel * stored
            else:
                vectors += numel * stored
        largest_module = max(largest_module, largest, layer_experts)
    return ParameterCounts(
        matrices=matrices,
        vectors=vectors,
        experts=experts,
        frozen=frozen,
        buffer_bytes=buffers,
        largest=largest,
        largest_module=largest_module,
        largest_update=update,
        sizes=tuple(sorted(sizes.items())),
        dense_moments=moments[False],
        expert_moments=moments[True],
        muon=tuple(muon),
        table=table,
    )
