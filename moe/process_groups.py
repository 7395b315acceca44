"""Process groups of some ranks, made once."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed
from torch.distributed import ProcessGroup

_Made = dict[tuple[str, tuple[int, ...]], ProcessGroup | None]
_made: WeakKeyDictionary[ProcessGroup, _Made] = WeakKeyDictionary()
"""By the group of all ranks: when that is destroyed, all others are."""


def group_of(ranks: Sequence[int], purpose: str) -> ProcessGroup | None:
    """Returns the group of ``ranks``, or None on other ranks. All ranks call this function, in one order.

    torch.distributed keeps a group, with the memory of its communicator, until the end. So a model that is built again
    gets the groups of the first one.

    Args:
        purpose: groups of the same ranks for other purposes have communicators of their own, which need not wait for
            each other.
    """
    world = torch.distributed.group.WORLD
    assert world is not None, "torch.distributed is not initialized"
    made, key = _made.setdefault(world, {}), (purpose, tuple(ranks))
    if key not in made:
        group = torch.distributed.new_group(list(ranks))  # on other ranks not None, but a number
        made[key] = group if torch.distributed.get_rank() in ranks else None
    return made[key]
