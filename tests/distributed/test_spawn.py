import gc
import multiprocessing
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import run_distributed


def _sum_of_ranks(factor: int) -> None:
    """Before that: the server has imported what it should, an error of which Python would ignore, and put it aside."""
    assert {"m6.training.loop", "tests.distributed.preload", "tests.distributed.test_views"} <= sys.modules.keys()
    assert gc.get_freeze_count() > len(gc.get_objects())
    dist.init_process_group("gloo")
    value = torch.tensor([factor * (1 + int(os.environ["RANK"]))])
    dist.all_reduce(value)
    assert value.item() == 3 * factor


def _one_fails() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank one gives up")
    dist.barrier()


def _hangs() -> None:
    time.sleep(600)


def test_processes_communicate() -> None:
    run_distributed(_sum_of_ranks, 2, 5)


def test_failure_carries_the_traceback_and_leaves_no_process() -> None:
    with pytest.raises(RuntimeError, match="rank one gives up"):
        run_distributed(_one_fails, 2)
    assert not multiprocessing.active_children()


def test_hanging_processes_are_killed() -> None:
    with pytest.raises(TimeoutError, match="_hangs on 2 processes"):
        run_distributed(_hangs, 2, timeout_s=3)
    assert not multiprocessing.active_children()
