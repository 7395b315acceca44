"""Compares copies of weights on several ranks: they must be bit-identical.

Megatron-LM does the same with ``--check-weight-hash-across-dp-replicas-interval``. A copy may drift by a fault of a
device or of the program. Without the comparison it then falsifies the gradients of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from m6.runs.processes import Runtime

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 4096
_LARGEST = 2**62 - 1


class Replicated(NamedTuple):
    """A tensor with a copy on each rank of ``group`` (None: of the run)."""

    name: str
    data: Tensor
    group: dist.ProcessGroup | None


def hash_of(tensor: Tensor) -> Tensor:
    """Returns a hash of the bits of a tensor, as a scalar int64 on its device. It reads the tensor once.

    The bits of the elements are integers. Each row of 4,096 integers is summed, then the mixed sums with odd weights.
    All sums are exact, so the hash does not depend on the order of additions.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    begin = bits.numel() - bits.numel() % _ROW
    sums = torch.cat(
        [bits[:begin].view(-1, _ROW).sum(1, dtype=torch.int64), bits[begin:].sum(dtype=torch.int64).view(1)]
    )
    weights = torch.arange(1, 2 * len(sums), 2, device=tensor.device)
    # The bits of each sum are mixed first, so that exchanged rows or opposite errors change the hash.
    mixed = (sums ^ (sums >> 29)) * 0x9E3779B97F4A7C1
    return (mixed * weights).sum() & _LARGEST


def find_difference(tensors: Iterable[Replicated], runtime: Runtime) -> str | None:
    """Describes the first tensor with unequal copies, and the ranks in the minority; None if all copies are equal.

    Every rank calls this function, and gets the same answer. Of only two copies, nobody knows the right one.
    """
    groups: dict[dist.ProcessGroup | None, list[tuple[str, Tensor]]] = {}
    for name, data, group in tensors:
        if dist.get_world_size(group) > 1:
            groups.setdefault(group, []).append((name, hash_of(data)))
    differing: list[tuple[str, int, list[int]]] = []
    for group, hashes in groups.items():
        own = torch.stack([each for _, each in hashes])
        # The largest negated hash is the negated smallest hash, so one all-reduce gives both bounds.
        bounds = torch.cat([own, -own])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        largest, smallest = bounds[: len(own)], -bounds[len(own) :]
        unequal = (largest != smallest).nonzero().flatten().tolist()
        if unequal:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            differing.append((hashes[unequal[0]][0], int(own[unequal[0]]), ranks))
    found = torch.tensor(float(bool(differing)), device=runtime.device)
    dist.all_reduce(found)
    if not found.item():
        return None
    of_all: list[list[tuple[str, int, list[int]]]] = [[]] * runtime.world_size
    dist.all_gather_object(of_all, differing)
    name, ranks = next((name, ranks) for own_differing in of_all for name, _, ranks in own_differing)
    hashes_of = {
        rank: value for rank in ranks for other, value, members in of_all[rank] if (other, members) == (name, ranks)
    }
    return _in_words(name, hashes_of, runtime)


def _in_words(name: str, hashes: dict[int, int], runtime: Runtime) -> str:
    # If several values are equally frequent, the copy of the first rank counts as right.
    (right, _), *_ = Counter(hashes.values()).most_common()
    first = next(rank for rank, value in hashes.items() if value == right)
    others = [runtime.name_of(rank) for rank, value in hashes.items() if value != right]
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return f"{name} of {', '.join(others[:4])}{more} differs from that of {runtime.name_of(first)}"
