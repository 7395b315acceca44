"""The reducer of ``"deterministic": "any_world"``: the same sums to the bit on any number of ranks.

It adds the gradients of micro-batches along the tree of ``m6.config.sum_tree``.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.config.run import RunConfig
from m6.config.sum_tree import Branch, TreeShape, halves
from m6.errors import UserError
from m6.training.deepspeed_private import expert_group, is_expert, take_gradient
from m6.training.engine.reducer import GradientReducer
from m6.training.mesh import Mesh
from m6.training.reduction.collectives import NodeGroups, buckets

if TYPE_CHECKING:
    from m6.training.offloading.experts import OffloadedExperts


class TreeGradients(GradientReducer):
    """Takes the gradients of each pass, and adds them in the order of a fixed tree, in fp32.

    Each part of the parameters has its own tree. For a parameter in two parts, the two sums over all ranks are added.

    Args:
        offloaded: the experts of ``m6.offload``. They belong to each part. ``sums`` writes their sums back to them.
    """

    measures_sums = True

    def __init__(self, config: RunConfig, mesh: Mesh, module: nn.Module, offloaded: OffloadedExperts | None) -> None:
        super().__init__(mesh, module)
        check_device(config, mesh.device)
        self._offloaded = offloaded
        self._same_experts = expert_group("expert_data_parallel", mesh.dims.ep)
        self._nodes = mesh.by_nodes(mesh.dims.ranks("dp"))
        self._nodes_of_experts = mesh.by_nodes(mesh.dims.copies_of_experts())
        self._parts: list[list[nn.Parameter]] = [self.trained]
        self._branches: dict[int, BranchSum] = {}
        if mesh.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it PyTorch refuses cuBLAS calls
            torch.use_deterministic_algorithms(True)

    @property
    def sums_here(self) -> bool:
        """See ``GradientReducer.sums_here``."""
        return True

    def divide(self, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        """See ``GradientReducer.divide``."""
        self._parts = [list(part) for part in parts]

    def end_pass(self, passes: tuple[int, ...], part: int = 0) -> None:
        """See ``GradientReducer.end_pass``."""
        if part not in self._branches:
            dims = self._mesh.dims
            self._branches[part] = BranchSum(TreeShape(passes[:: dims.ep], dims.ep), dims.part(dims.ep)[0])
        leaf = [take_gradient(parameter) for parameter in self._parts[part]]
        if self._offloaded is not None:
            leaf += self._offloaded.runtime.take_gradients()
        self._branches[part].add(leaf)

    def sums(self, loss_scale: float, averaged_over: int) -> dict[nn.Parameter, Tensor]:
        """See ``GradientReducer.sums``; only for ``averaged_over`` 1."""
        assert averaged_over == 1
        branches, self._branches = self._branches, {}
        of_parameters: dict[nn.Parameter, Tensor] = {}
        of_offloaded: list[Tensor] = []
        for part, parameters in enumerate(self._parts):
            sums = self._over_ranks(parameters, branches.pop(part))
            for parameter, total in zip(parameters, sums, strict=False):
                other = of_parameters.get(parameter)
                of_parameters[parameter] = total if other is None else other.add_(total)
            others = sums[len(parameters) :]
            of_offloaded = others if part == 0 else [a + b for a, b in zip(of_offloaded, others, strict=True)]
        if self._offloaded is not None:
            self._offloaded.runtime.put_gradients(of_offloaded)
        return of_parameters

    def _over_ranks(self, parameters: list[nn.Parameter], own: BranchSum) -> list[Tensor]:
        """Returns the sums of a part over all ranks: first of the parameters, then of offloaded experts."""
        found: dict[int, Tensor] = {}
        shape, branches = own.shape, own.finish()
        tensors = range(len(branches[0]))
        for of_experts in (False, True):
            # Without expert parallelism every rank has all experts.
            split = of_experts and self._same_experts is not None
            chosen = [
                index for index in tensors if (index >= len(parameters) or is_expert(parameters[index])) == of_experts
            ]
            group = self._same_experts if split else self._mesh.replicas
            of_chosen = [[branch[index] for index in chosen] for branch in branches]
            order = TreeShape(shape.shares) if split else shape
            nodes = self._nodes_of_experts if split else self._nodes
            sums = sum_over_ranks(of_chosen, order, group, self._mesh.device, nodes)
            found |= dict(zip(chosen, sums, strict=True))
        return [found[index] for index in tensors]


def check_device(config: RunConfig, device: torch.device) -> None:
    """Raises UserError if the model has an operation with a non-deterministic gradient on this device."""
    if device.type == "cuda" and config.model.patch_encoder == "resnet":
        raise UserError(
            'm6.training.deterministic "any_world": the gradient of max pooling, which m6.model.patch_encoder "resnet" '
            'needs, adds up in no fixed order on a GPU; use patch_encoder "linear", or leave one of them out'
        )


class BranchSum:
    """Adds the leaves of one rank in order. It holds one partial sum for each incomplete branch.

    Args:
        shape: of the tree.
        group: the expert-parallel group of the rank.
    """

    def __init__(self, shape: TreeShape, group: int) -> None:
        self.shape, self._group = shape, group
        self._next, _ = shape.part(group)
        self._partial: list[list[Tensor]] = []

    def add(self, leaf: list[Tensor]) -> None:
        """Adds a leaf, and takes ownership of its tensors."""
        self._partial.append(leaf)
        for _ in range(self.shape.joins(self._group, self._next)):
            right = self._partial.pop()
            torch._foreach_add_(self._partial[-1], right)
        self._next += 1

    def finish(self) -> list[list[Tensor]]:
        """Returns the sums of the rank's branches in order."""
        _, end = self.shape.part(self._group)
        assert self._next == end, f"{end - self._next} leaves are missing"
        return self._partial


def sum_over_ranks(
    branches: Sequence[Sequence[Tensor]],
    shape: TreeShape,
    group: dist.ProcessGroup | None,
    device: torch.device,
    nodes: NodeGroups | None = None,
) -> list[Tensor]:
    """Sums tensors over the ranks of a group, in the order of the tree.

    An all-to-all gives each rank a chunk of all ranks' elements. The rank adds it up, and an all-gather collects the
    sums. This takes as many bytes as an all-reduce, and half as many again for each further branch of a rank. An
    all-reduce would not do: its order of additions depends on the number of ranks.

    With ``nodes`` the ranks of a node first add up the branches that lie in the node. Between nodes a rank then sends
    and receives the sums of the node's branches, of its chunk alone. In a tree of one column, nodes of L ranks with one
    branch each, which add up to one branch, send 1 / L of the bytes of one exchange between nodes.

    Args:
        branches: of this rank, each with fp32 tensors of equal shapes on all ranks.
        shape: the tree, with the ranks of ``group`` in rows of ``group_size``. Each column is added along the tree,
            then the sums of the columns are added in order.
        group: None: all ranks.
        device: for the exchange of tensors in the group.
        nodes: the ranks of ``group`` by nodes; None: one exchange with all ranks.

    Returns:
        tensors of the same shapes, on the devices of ``branches``.
    """
    if shape.ranks == 1:
        return list(branches[0])
    levels = [Level.of_all(shape, group)]
    if nodes is not None and nodes.ranks_of_node % shape.group_size == 0:
        rows = nodes.ranks_of_node // shape.group_size
        levels = [Level.in_node(shape, rows, nodes.number, nodes.inside), Level.of_nodes(shape, rows, nodes.between)]
    found: list[Tensor] = []
    for bucket in zip(*map(buckets, branches), strict=True):
        flat = torch.stack([torch.cat([each.reshape(-1).to(device) for each in tensors]) for tensors in bucket])
        sums = _sum(flat, levels).split([tensor.numel() for tensor in bucket[0]])
        found += [total.view_as(tensor).to(tensor.device) for total, tensor in zip(sums, bucket[0], strict=True)]
    return found


@dataclass(frozen=True)
class Level:
    """An exchange of branches among the ranks of a group, who then add up larger branches.

    Attributes:
        held: the branches of each rank, one list for each of its columns.
        wanted: the larger branches, of each column.
        group: None: all ranks.
    """

    held: Sequence[Sequence[tuple[int, Sequence[Branch]]]]
    wanted: Sequence[Branch]
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_all(cls, shape: TreeShape, group: dist.ProcessGroup | None = None) -> Level:
        """All ranks add up the whole tree."""
        return cls(_held_by_ranks(shape, range(len(shape.shares))), [(0, shape.leaves)], group)

    @classmethod
    def in_node(cls, shape: TreeShape, rows: int, node: int, group: dist.ProcessGroup | None = None) -> Level:
        """The ranks of a node add up the largest branches in its part; ``rows``: of ``shape`` on each node."""
        own = range(node * rows, (node + 1) * rows)
        return cls(_held_by_ranks(shape, own), _shape_of_nodes(shape, rows).branches[node], group)

    @classmethod
    def of_nodes(cls, shape: TreeShape, rows: int, group: dist.ProcessGroup | None = None) -> Level:
        """A rank of each node adds up the whole tree, from the branches of ``in_node``."""
        merged = _shape_of_nodes(shape, rows)
        columns = range(shape.group_size)
        held = [[(column, merged.branches[node]) for column in columns] for node in range(len(merged.shares))]
        return cls(held, [(0, shape.leaves)], group)

    def add_up(self, received: Iterable[Tensor]) -> list[Tensor]:
        """Adds the branches of all ranks to those of ``wanted``, in the order of the tree.

        Args:
            received: the branches of all ranks in order, each [n]. Some are overwritten.

        Returns:
            the sums, column by column.
        """
        columns: dict[int, dict[Branch, Tensor]] = {}
        rows = iter(received)
        for column, branches in itertools.chain.from_iterable(self.held):
            columns.setdefault(column, {}).update(zip(branches, itertools.islice(rows, len(branches)), strict=True))
        return [_total(columns[column], branch) for column in sorted(columns) for branch in self.wanted]


def _held_by_ranks(shape: TreeShape, rows: Iterable[int]) -> list[list[tuple[int, Sequence[Branch]]]]:
    return [[(column, shape.branches[row])] for row in rows for column in range(shape.group_size)]


def _shape_of_nodes(shape: TreeShape, rows: int) -> TreeShape:
    """The tree with the parts of whole nodes, of so many rows each."""
    return TreeShape(tuple(sum(shape.shares[first : first + rows]) for first in range(0, len(shape.shares), rows)))


def _sum(values: Tensor, levels: Sequence[Level]) -> Tensor:
    """Sums this rank's branches [branches, n] level by level; after the last one the columns are added in order."""
    level, *later = levels
    ranks, numel = len(level.held), values.shape[1]
    padded = torch.nn.functional.pad(values, (0, -numel % ranks))
    chunk = padded.shape[1] // ranks
    sent = padded.view(len(values), ranks, chunk).transpose(0, 1).contiguous()
    counts = [sum(len(branches) for _, branches in columns) for columns in level.held]
    received = sent.new_empty(sum(counts), chunk)
    dist.all_to_all_single(received, sent.view(-1, chunk), counts, [len(values)] * ranks, group=level.group)
    whole, larger = sent.new_empty(ranks, chunk), level.add_up(received)
    own = _sum(torch.stack(larger), later) if later else functools.reduce(torch.Tensor.add_, larger)
    dist.all_gather(list(whole.unbind()), own, group=level.group)
    return whole.view(-1)[:numel]


def _total(sums: dict[Branch, Tensor], branch: Branch) -> Tensor:
    """Returns the sum of a branch from the sums of its inner branches. It overwrites one of them."""
    if branch in sums:
        return sums[branch]
    left, right = halves(branch)
    return _total(sums, left).add_(_total(sums, right))
