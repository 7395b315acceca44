"""Groups of some ranks are made once, as long as the group of all lives."""

import torch.distributed as dist

from moe.process_groups import group_of
from tests.distributed.spawn import run_distributed


def make_groups() -> None:
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            group = group_of([0], "exchange")
            assert group is not None
            assert dist.get_process_group_ranks(group) == [0]
            assert group_of(range(1), "exchange") is group
            assert group_of([0], "tensor") is not group
            found.append(group)
        finally:
            dist.destroy_process_group()
    assert found[0] is not found[1], "of a destroyed group of all"


def test_a_group_is_made_once_for_a_purpose():
    run_distributed(make_groups, 1)
