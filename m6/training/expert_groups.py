"""DeepSpeed's groups of ranks that share out experts; None stands for all ranks, or where there is one alone."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

GroupKind = Literal["expert_parallel", "expert_data_parallel"]


def expert_group(kind: GroupKind, ep_size: int) -> dist.ProcessGroup | None:
    """Of this rank's: the ranks that together hold all experts (``expert_parallel``), or those that hold the same.

    Args:
        ep_size: over so many ranks the experts are split.

    Returns:
        None with ep_size 1: then there is no group of the first kind, and of the second all ranks are one.
    """
    return None if ep_size == 1 else named_expert_group(kind, f"ep_size_{ep_size}")


def named_expert_group(kind: GroupKind, name: str) -> dist.ProcessGroup:
    """The same by the ``group_name`` of a parameter of experts."""
    from deepspeed.utils import groups

    group: dist.ProcessGroup = getattr(groups, f"_get_{kind}_group")(name)
    return group
