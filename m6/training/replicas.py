"""Compares weights of which several ranks hold copies: those have to be equal to the bit.

Megatron-LM does the same with ``--check-weight-hash-across-dp-replicas-interval``. A copy that drifts, by a fault of a
device or of the program, otherwise falsifies the gradients of all ranks from then on.
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
    """A tensor of which each rank of ``group`` (None: of the run) holds a copy."""

    name: str
    data: Tensor
    group: dist.ProcessGroup | None


def hash_of(tensor: Tensor) -> Tensor:
    """A hash of the bits of a tensor, as a scalar int64 on its device; one pass reads the tensor.

    The integers of each row of 4,096 elements are added up, and the sums with odd weights. All of that is exact, so
    that it depends on no order.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    begin = bits.numel() - bits.numel() % _ROW
    sums = torch.cat(
        [bits[:begin].view(-1, _ROW).sum(1, dtype=torch.int64), bits[begin:].sum(dtype=torch.int64).view(1)]
    )
    weights = torch.arange(1, 2 * len(sums), 2, device=tensor.device)
    # Neighbouring rows may not be exchanged, nor sums cancel: their bits are mixed first.
    mixed = (sums ^ (sums >> 29)) * 0x9E3779B97F4A7C1
    return (mixed * weights).sum() & _LARGEST


def find_difference(tensors: Iterable[Replicated], runtime: Runtime) -> str | None:
    """Says which rank's copy of which tensor differs from those of other ranks; None if all are equal.

    Every rank calls this function, and gets the same answer. Ranks whose copies are in the minority are named; of two,
    nobody knows which one is right.
    """
    groups: dict[dist.ProcessGroup | None, list[tuple[str, Tensor]]] = {}
    for name, data, group in tensors:
        if dist.get_world_size(group) > 1:
            groups.setdefault(group, []).append((name, hash_of(data)))
    differing: list[tuple[str, int, list[int]]] = []
    for group, hashes in groups.items():
        own = torch.stack([each for _, each in hashes])
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
    # Of as many copies of each kind, that of the first rank is taken for the right one.
    (right, _), *_ = Counter(hashes.values()).most_common()
    first = next(rank for rank, value in hashes.items() if value == right)
    others = [runtime.name_of(rank) for rank, value in hashes.items() if value != right]
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return f"{name} of {', '.join(others[:4])}{more} differs from that of {runtime.name_of(first)}"
