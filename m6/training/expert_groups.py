"""The process groups of expert parallelism, which DeepSpeed creates."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist

GroupKind = Literal["expert_parallel", "expert_data_parallel"]


def expert_group(kind: GroupKind, ep_size: int) -> dist.ProcessGroup | None:
    """A process group of this rank.

    Args:
        kind: ``expert_parallel``: the ranks that together hold all experts; ``expert_data_parallel``: the ranks that
            hold the same experts.
        ep_size: number of ranks over which the experts are split.

    Returns:
        None if ep_size is 1. There is then no expert-parallel group, and all ranks hold the same experts: as an
        argument of a collective, None means all ranks.
    """
    return None if ep_size == 1 else named_expert_group(kind, f"ep_size_{ep_size}")


def named_expert_group(kind: GroupKind, name: str) -> dist.ProcessGroup:
    """A process group of this rank; ``name`` is the ``group_name`` of an expert's parameter."""
    from deepspeed.utils import groups

    group: dist.ProcessGroup = getattr(groups, f"_get_{kind}_group")(name)
    return group
