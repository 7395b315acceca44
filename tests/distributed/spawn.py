"""Runs a function on several local processes, as the launcher would start them."""

import contextlib
import itertools
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException

_OFFSETS = itertools.count()
# A server that has imported these forks each process: to import them anew would take most of a test's time.
_CONTEXT = torch.multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.distributed.preload"])


def run_distributed(function: Callable[..., None], world_size: int, *args: Any, timeout_s: float = 1500) -> None:
    """Calls ``function(*args)`` on ``world_size`` fresh processes and waits for all of them.

    ``function`` is at the top level of a test module and finds its rank in the environment (RANK, LOCAL_RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so it may call ``torch.distributed.init_process_group("gloo")`` or
    ``init_deepspeed()`` at once.

    Raises:
        RuntimeError: with the traceback of the process that failed first.
        TimeoutError: when not all are done after ``timeout_s`` seconds.
    In both cases no process is left behind.
    """
    failures = _CONTEXT.SimpleQueue()
    arguments = (function, world_size, free_port(), failures, dict(os.environ), args)
    context = torch.multiprocessing.start_processes(
        _child, arguments, nprocs=world_size, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{function.__name__} on {world_size} processes ran past {timeout_s} s")
    except ProcessExitedException:
        if failures.empty():  # killed by a signal: torch's message names it
            raise
        rank, text = failures.get()
        raise RuntimeError(f"rank {rank} of {world_size} failed:\n{text}") from None
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def exit_codes(function: Callable[..., None], world_size: int, *args: Any, timeout_s: float = 600) -> list[int | None]:
    """Calls ``function(*args)`` on processes that nobody ends when one of them fails; None: still there in the end."""
    arguments = (function, world_size, free_port(), _CONTEXT.SimpleQueue(), dict(os.environ), args)
    context = torch.multiprocessing.start_processes(
        _child, arguments, nprocs=world_size, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + timeout_s
    try:
        for process in context.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in context.processes]
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def init_deepspeed() -> None:
    """Initialises DeepSpeed's communication over gloo on the CPU."""
    import deepspeed
    import deepspeed.comm

    # DeepSpeed would compile a shared-memory all-reduce here, which leaves large files in /dev/shm.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", verbose=False)


def _child(
    rank: int,
    function: Callable[..., None],
    world_size: int,
    port: int,
    failures: "SimpleQueue[tuple[int, str]]",
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)  # the server was started with an earlier one
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)  # the variable comes too late for this process, whose torch is loaded
    try:
        function(*args)
    except SystemExit:
        raise
    except BaseException:
        # Told before the connections close: the other ranks then fail as well, and theirs is not the cause.
        failures.put((rank, traceback.format_exc()))
        raise SystemExit(1) from None
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_port() -> int:
    """A port that nobody takes before the ranks do: below those that the kernel hands out, and of this worker alone."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for port in itertools.islice(_OFFSETS, 1000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", 10_000 + 1000 * worker + port % 1000))
            return int(listener.getsockname()[1])
    raise RuntimeError("no port is free")
