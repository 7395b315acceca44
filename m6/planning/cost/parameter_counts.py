"""The number and sizes of the parameters of one rank, before ZeRO partitions them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from m6.planning.cost.folding import FoldedModel, Shape
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.muon import MuonMatrices
from m6.planning.cost.precision import FP32

ADAMW_MOMENTS = 2
"""Elements of AdamW's state for each parameter."""
_MOMENTS_OF_MATRICES = {"AdamW": ADAMW_MOMENTS, "Lamb": ADAMW_MOMENTS, "Muon": 1, "Lars": 1}
"""Elements of state for each element of a matrix of a block, of the optimizers for parts of matrices."""


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group of one rank's optimizer. DeepSpeed flattens it at ZeRO stages 1 and 2.

    Attributes:
        numel: elements before ZeRO partitions them.
        of_experts: whether it has experts with groups of ranks of their own.
        by_muon: whether Muon updates it.
        moments: elements of optimizer state for each parameter.
    """

    numel: int
    of_experts: bool = False
    by_muon: bool = False
    moments: int = ADAMW_MOMENTS

    def ranks(self, layout: ParallelLayout) -> int:
        """Number of ZeRO's partitions of the group."""
        return layout.expert_copies if self.of_experts else layout.dp_size

    def partition(self, layout: ParallelLayout) -> int:
        """Elements of a rank's partition; partitions begin at even offsets."""
        return math.ceil(self.numel / (2 * self.ranks(layout))) * 2

    def state(self, numel: int) -> int:
        """Elements of fp32 weights and optimizer state for ``numel`` of its parameters."""
        return 2 * numel if self.by_muon else (1 + self.moments) * numel + 1  # with a step counter


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

    @property
    def local(self) -> int:
        """All trainable parameters of the rank."""
        return self.matrices + self.vectors + self.experts

    def groups(self, optimizer_type: str) -> list[ParameterGroup]:
        """The optimizer's non-empty parameter groups: with weight decay, without it, and ``experts``."""
        muon = optimizer_type == "Muon"
        blocks = sum(part.numel for part in self.muon if not part.of_experts) if muon else 0
        moments = 1 if optimizer_type == "Lars" else ADAMW_MOMENTS
        groups = (
            ParameterGroup(blocks, by_muon=True),
            ParameterGroup(self.matrices - blocks, moments=moments),
            ParameterGroup(self.experts, of_experts=True, by_muon=muon, moments=moments),
            ParameterGroup(self.vectors, moments=moments),
        )
        return [group for group in groups if group.numel > 0]

    def divided(self, layout: ParallelLayout) -> ParameterCounts:
        """The counts of one rank of a tensor group. Biases are counted whole, though 1-D divides some of them."""
        parts = layout.tp_size
        if parts == 1:
            return self
        if layout.placement != "megatron":
            muon = tuple(part if part.of_experts else replace(part, parts=parts) for part in self.muon)
            elsewhere = sum(part.numel for part in self.muon) - sum(part.numel for part in muon)
            moments = {
                name: num_bytes - _MOMENTS_OF_MATRICES.get(name, 0) * elsewhere * FP32
                for name, num_bytes in self.dense_moments.items()
            }
            return replace(self, matrices=self.matrices - elsewhere, dense_moments=moments, muon=muon)
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
    model: FoldedModel, ep_size: int, with_experts: bool = True, tensor_groups: bool = False
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
    )


def moment_bytes(shape: Shape, optimizer_type: str, of_blocks: bool) -> int:
    """Bytes of the unpartitioned optimizer state of one parameter, with its step counter.

    Args:
        of_blocks: the parameter is a matrix of a block. Under Muon the others are updated by AdamW.
    """
    numel = math.prod(shape)
    if optimizer_type == "Muon" and of_blocks:
        return numel * FP32  # a momentum and no counter
    if optimizer_type == "Lars":
        elements = numel
    elif optimizer_type in ("AdamW", "Muon", "Lamb"):
        elements = ADAMW_MOMENTS * numel
    elif len(shape) > 1:
        elements = numel // shape[-1] + numel // shape[-2]  # Adafactor: a mean for each row and each column
    else:
        elements = numel
    return (elements + 1) * FP32
