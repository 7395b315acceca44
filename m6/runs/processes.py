"""Starts a process of a run: its rank, its device and the process group.

The processes first meet: if one ends before it comes, because its own configuration is wrong, the others name it. They
would otherwise wait in the library as long as in a collective, and its error names nobody.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
import torch.distributed as dist
from torch.distributed import distributed_c10d

from m6.config.deepspeed import prepare_deepspeed
from m6.errors import RetryableError, StorageError, UserError, first_line
from m6.runs.environment import is_under_srun, rank_variables

MEETING_TIMEOUT_S = 600.0
"""How long the processes of a run wait for each other at the start. The imports of some nodes may take minutes."""
_SHORTEST_S, _LONGEST_S = 0.01, 1.0  # pauses between two questions
# The most missing ranks in a message.
_NAMED = 4
_HERE, _SIZE, _CARDS, _COUNT, _ALL, _WHY_NOT = "here", "size", "cards", "count", "all", "why_not"


def meet(rank: int, world_size: int, timeout_s: float = MEETING_TIMEOUT_S, has_gpu: bool | None = None) -> dist.Store:
    """Waits until all processes of the run have come to MASTER_ADDR and MASTER_PORT; returns the store that they share.

    Args:
        timeout_s: how long to wait.
        has_gpu: whether this process sees a GPU; None: the same on all ranks.

    Raises:
        UserError: MASTER_PORT is no port, or another process has this rank or another WORLD_SIZE.
        RetryableError: processes did not come, with their number and some of their ranks; or only some see a GPU.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise UserError(f"MASTER_PORT is {port!r}; expected a port, 1 to 65535")
    end = time.monotonic() + timeout_s
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not of_torchrun
    if not serves:
        _wait_for_server(address, int(port), end, timeout_s)
    arguments = (address, int(port), world_size, serves, timedelta(seconds=timeout_s))
    try:
        server = dist.TCPStore(*arguments, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        raise RetryableError(f"MASTER_ADDR {address}, MASTER_PORT {port}: {first_line(error)}") from None
    # The store of torchrun outlives the processes. Those that it starts again need no words of the ones before.
    store = dist.PrefixStore(f"m6_start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)
    came = 0
    try:
        if of_torchrun:  # it gives all of them their numbers
            store.set(f"{_HERE}/{rank}", "")
        else:
            _introduce(store, rank, world_size)
        if has_gpu is not None:
            _compare_cards(store, rank, has_gpu)
        came = store.add(_COUNT, 1)
        if came >= world_size:
            store.set(_ALL, "")
        for _ in _until(end):
            if store.check([_ALL]):
                return store
            if store.check([_WHY_NOT]):
                raise RetryableError(store.get(_WHY_NOT).decode())
        came = store.add(_COUNT, 0)
        missing = [f"rank {other}" for other in range(world_size) if not store.check([f"{_HERE}/{other}"])]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        why_not = (
            f"{came} of {world_size} ranks came to {address}:{port} within {timeout_s:.0f} s, but not "
            f"{', '.join(missing[:_NAMED])}{more}; their own logs say why they ended, if WORLD_SIZE processes were "
            "started"
        )
        store.set(_WHY_NOT, why_not)
        raise RetryableError(why_not)
    except UserError:
        if serves:
            time.sleep(2 * _LONGEST_S)  # the others read the reason here
        raise
    except RuntimeError as error:
        raise RetryableError(
            f"{came} of {world_size} ranks had come to {address}:{port} when the process that listens there, of rank 0 "
            f"or of torchrun, ended ({first_line(error)}); its log may say why"
        ) from None


def _introduce(store: dist.Store, rank: int, world_size: int) -> None:
    """Writes down that this process is the rank; ends all processes if another one contradicts it."""
    own = f"process {os.getpid()} on {_node()}"
    other = store.compare_set(f"{_HERE}/{rank}", "", own).decode()
    size = store.compare_set(_SIZE, "", f"{world_size} for {own}").decode()
    if other != own:
        why_not = f"RANK is {rank} for {own} and for {other}; a launcher has to give each process a RANK of its own"
    elif size.split()[0] != str(world_size):
        why_not = f"WORLD_SIZE is {world_size} for {own}, but {size}; it has to be the number of all processes"
    else:
        return
    store.set(_WHY_NOT, why_not)
    raise UserError(why_not)


def _compare_cards(store: dist.Store, rank: int, has_gpu: bool) -> None:
    """Ends all processes if only some see a GPU: NCCL of those would wait for gloo of the others until the time-out."""
    own = f"{'a' if has_gpu else 'no'} GPU on rank {rank} on {_node()}"
    first = store.compare_set(_CARDS, "", own).decode()
    if first.split()[0] != own.split()[0]:
        why_not = (
            f"PyTorch sees {own}, but {first}; repair or leave out the node without one, or set CUDA_VISIBLE_DEVICES "
            "to an empty text on all ranks"
        )
        raise RetryableError(store.compare_set(_WHY_NOT, "", why_not).decode())  # of several ranks the first says it


def _node() -> str:
    """The name of this node. Slurm's comes first: several of its nodes may be one host."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def _wait_for_server(address: str, port: int, end: float, timeout_s: float) -> None:
    # By a plain connection: an attempt of the library writes a stack to the log.
    reason = ""
    for left_s in _until(end):
        try:
            socket.create_connection((address, port), timeout=left_s).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
    raise RetryableError(
        f"nothing listened at MASTER_ADDR {address}, MASTER_PORT {port} for {timeout_s:.0f} s ({reason}), where rank 0 "
        "or torchrun should; its log may say why it ended, or the address is another one"
    )


def _until(end: float) -> Iterator[float]:
    """Yields the seconds that are left until a time, with longer and longer pauses; at least once."""
    pause_s = _SHORTEST_S
    while True:
        yield max(_LONGEST_S, end - time.monotonic())
        if time.monotonic() >= end:
            return
        time.sleep(pause_s)
        pause_s = min(_LONGEST_S, 1.5 * pause_s)


COLLECTIVE_TIMEOUT_S = 1800.0
"""How long a collective waits for a rank. All other waits must be shorter. Otherwise the collective of the other ranks
would end first, and the waiting rank could not say what it waited for."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Runtime:
    """The place of this process among all processes of the run.

    Attributes:
        rank: number of the process, from 0.
        world_size: number of processes.
        local_rank: number of the process on its node, or of its GPU if it sees only one.
        device: the GPU of this process, or the CPU.
        nodes: the name of the node of each process.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    nodes: tuple[str, ...] = ()

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def name_of(self, rank: int) -> str:
        """A rank in words, such as "rank 3 on node7"."""
        return f"rank {rank} on {self.nodes[rank]}" if rank < len(self.nodes) else f"rank {rank}"


def start(timeout_s: float = COLLECTIVE_TIMEOUT_S) -> Runtime:
    """Joins the process group: one process without a launcher, or one of many under torchrun, deepspeed or srun.

    Args:
        timeout_s: how long a collective may wait before the process gives up, in seconds.

    Raises:
        UserError: the variables name several processes but no address to meet at, or more processes than GPUs.
        RetryableError: processes did not come, see ``meet``.
    """
    cuda = torch.cuda.is_available()
    prepare_deepspeed()
    _complete_environment()
    import deepspeed

    keep_freed_memory(torch.device("cuda" if cuda else "cpu"))
    if not cuda:
        # oneDNN caches a kernel with its buffers for each of the last 1,024 shapes, and packed micro-batches have as
        # many. In a smoke run in bf16 such a cache held 1.1 GiB more than a cache of 64 kernels, and only the latter
        # stopped growing. Without a cache the steps took 1.7 times as long
        # (scripts/benchmarks/results/train_step_onednn.md). 64 are too few for the matmuls of experts, although their
        # numbers of rows are rounded up to multiples (moe/kernels/products.py).
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
        # DeepSpeed would compile a shared-memory all-reduce at start. A killed build blocks every later run, and each
        # rank leaves 69 MB in /dev/shm. gloo does the same work.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    local_rank, device = int(os.environ["LOCAL_RANK"]), own_device()
    if cuda:
        torch.cuda.set_device(device)
    backend, timeout = "nccl" if cuda else "gloo", timedelta(seconds=timeout_s)
    # Process groups of some ranks, mostly made by DeepSpeed, are given no timeout and get these defaults. In torch 2.13
    # they are 10 minutes for NCCL, and a rank may need longer to load its checkpoint.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not torch.distributed.is_initialized():
        store: torch.distributed.Store
        if world_size == 1:  # a HashStore needs no port; another process could take a chosen port
            store = torch.distributed.HashStore()
            atexit.register(_leave)
        else:
            _check_address(world_size)
            store = meet(rank, world_size, min(timeout_s, MEETING_TIMEOUT_S), has_gpu=cuda)
            store.set_timeout(timeout)
        torch.distributed.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
        deepspeed.init_distributed(
            dist_backend=backend,
            timeout=timeout,
            auto_mpi_discovery=False,  # the environment is complete, and mpi4py need not be installed
            verbose=False,
        )
    if cuda:
        _claim(distributed_c10d._get_default_store(), str(torch.cuda.get_device_properties(device).uuid), rank)
    nodes = [""] * world_size
    torch.distributed.all_gather_object(nodes, _node())
    return Runtime(rank, world_size, local_rank, device, tuple(nodes))


def _claim(store: torch.distributed.Store, card: str, rank: int) -> None:
    """Claims a card for a rank: with two ranks on one card NCCL would end in an error without the cause.

    Raises:
        UserError: another rank has claimed the card.
    """
    owner = store.compare_set(f"m6_card/{card}", "", str(rank)).decode()
    if owner != str(rank):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UserError(
            f"rank {rank} has the GPU {card} of rank {owner} (LOCAL_RANK {os.environ['LOCAL_RANK']}, "
            f"CUDA_VISIBLE_DEVICES {visible}); start one rank for each GPU"
        )


def _leave() -> None:
    """Destroys the process group: a process can abort if it exits while gloo's threads run.

    Only a single process does this: among several, an early exit would wait for the others.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_memory(device: torch.device) -> None:
    """Frees unreferenced memory; the garbage collector runs first, since DeepSpeed's engine has reference cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def return_freed_memory(device: torch.device) -> None:
    """Returns the memory kept by ``keep_freed_memory`` to the kernel; does nothing where tensors are on a GPU.

    Buffers of varying size fragment the heap: without this call it grows over thousands of steps.
    """
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def keep_freed_memory(device: torch.device) -> None:
    """Tells glibc to reuse freed memory instead of returning it to the kernel, where tensors are in host memory.

    Every step frees and allocates the same large buffers. The kernel would clear all their pages each time, and this
    takes a large part of a step on a CPU.
    """
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4  # from malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)


def _complete_environment() -> None:
    """Sets the variables of torchrun where another launcher, or none, started this process."""
    under_srun = is_under_srun()
    os.environ.update(rank_variables())
    # With --gpus-per-task=1, --gpu-bind=single:1 or a similar option of another launcher, each rank sees only its own
    # card, with the number 0. A container for each rank has its card in NVIDIA_VISIBLE_DEVICES. DeepSpeed reads
    # LOCAL_RANK, too.
    shown = [os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")]
    is_bound = under_srun or any(map(_names_one, shown))
    if is_bound and torch.cuda.device_count() == 1:
        os.environ["LOCAL_RANK"] = "0"


def _names_one(cards: str) -> bool:
    named = [card.strip() for card in cards.split(",") if card.strip()]
    return len(named) == 1 and named[0] not in ("all", "none", "void")  # NVIDIA's words for no single card


def _check_address(world_size: int) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(
                f"{name} is not set, by which the {world_size} processes of WORLD_SIZE find each other; torchrun, "
                "deepspeed and the shipped sbatch scripts set it"
            )


def own_device() -> torch.device:
    """The GPU of this process by its rank on the node, or the CPU; needs no process group.

    Raises:
        RetryableError: the node shows fewer GPUs than ranks.
    """
    _complete_environment()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, num_cards = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= num_cards:
        raise RetryableError(  # the node may have lost a GPU; preflight finds this before the next attempt
            f"LOCAL_RANK is {local_rank}, but this process sees {num_cards} GPUs, numbered from 0; start one rank for "
            "each GPU"
        )
    return torch.device("cuda", local_rank)


def default_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_main_rank(work: Callable[[], _Result]) -> _Result:
    """Does ``work`` on the main rank and returns its result on every rank. Every rank calls this function.

    Any failure of ``work`` ends all ranks. A defect of the program keeps its traceback on the main rank, and is a
    RetryableError on the others.

    Args:
        work: its result is sent to the other ranks.

    Raises:
        UserError: of ``work``; an error of the file system is a StorageError.
    """
    found: list[Any] = [None, None]
    failure: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            found[0] = work()
        except Exception as error:  # also a defect of the program: the other ranks would wait
            failure, found[1] = error, _in_words(error)
    torch.distributed.broadcast_object_list(found, src=0)
    if found[1] is not None:
        _raise(found[1], failure)
    result: _Result = found[0]
    return result


def raise_together(failure: Exception | None) -> None:
    """Raises the failure of any rank on all ranks. Every rank calls this function.

    Args:
        failure: of this rank; None: nothing went wrong here.

    Raises:
        UserError: of the first failed rank; as in ``on_main_rank``.
    """
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, None if failure is None else _in_words(failure))
    failed = {rank: words for rank, words in enumerate(found) if words is not None}
    if not failed:
        return
    rank, (kind, message) = min(failed.items())
    # A message shared by all ranks needs no name of a rank.
    named = message.startswith("rank ") or (len(failed) == len(found) and len(set(failed.values())) == 1)
    _raise((kind, message if named else f"rank {rank}: {message}"), failure)


def _in_words(error: Exception) -> tuple[type[UserError], str]:
    """Type and message of the exception on the other ranks for an error of this one."""
    if isinstance(error, (StorageError, OSError)):
        return StorageError, str(error)
    if isinstance(error, UserError):
        return type(error), str(error)
    rank = torch.distributed.get_rank()
    return RetryableError, f"rank {rank}: {type(error).__name__}: {error}; the log of rank {rank} has the traceback"


def _raise(words: tuple[type[UserError], str], failure: Exception | None) -> None:
    """Raises the error sent by a rank, or this rank's own error if it is a defect of the program."""
    if failure is not None and not isinstance(failure, (UserError, OSError)):
        raise failure
    kind, message = words
    raise kind(message)
