"""Process groups of some ranks, made once."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed
from torch.distributed import ProcessGroup

_Made = dict[tuple[str, tuple[int, ...]], ProcessGroup | None]
_made: WeakKeyDictionary[ProcessGroup, _Made] = WeakKeyDictionary()
"""Keyed by the group of all ranks, because its destruction destroys all other groups."""


def group_of(ranks: Sequence[int], purpose: str) -> ProcessGroup | None:
    """Returns the group of ``ranks``, or None on other ranks. All ranks must call this function in the same order.

    torch.distributed keeps a group and the memory of its communicator until the end of the process. A second model in
    the process therefore reuses the groups of the first.

    Args:
        purpose: each purpose has its own group and communicator for the same ranks, so that collectives of different
            purposes do not wait for each other.
    """
    world = torch.distributed.group.WORLD
    assert world is not None, "torch.distributed is not initialized"
    made, key = _made.setdefault(world, {}), (purpose, tuple(ranks))
    if key not in made:
        group = torch.distributed.new_group(list(ranks))  # on other ranks not None, but a number
        made[key] = group if torch.distributed.get_rank() in ranks else None
    return made[key]
