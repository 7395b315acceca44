"""Starting up a process: which rank it is, which device it uses, how it joins the others."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import numpy
import torch
import torch.distributed

from m6.config.deepspeed import prepare_deepspeed
from m6.errors import StorageError, UserError

# What launchers call the same three facts: torchrun and deepspeed set the first, srun the second.
_RANK_VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


@dataclass(frozen=True)
class Runtime:
    """Where this process stands."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(timeout_s: float = 1800.0) -> Runtime:
    """Joins the process group: one process without a launcher, or one of many under torchrun, deepspeed or srun.

    Args:
        timeout_s: how long a collective may wait before the process gives up, in seconds.
    """
    cuda = torch.cuda.is_available()
    prepare_deepspeed()
    _complete_environment()
    import deepspeed

    if not cuda:
        _keep_freed_memory()
        # oneDNN keeps a kernel with its buffers for each of the last 1024 shapes, and packed micro-batches come in
        # as many: a run grew by 4 MB a step. Making kernels anew costs no time that could be measured.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
        # DeepSpeed's shared-memory all-reduce is compiled at start (a killed build blocks every later
        # run) and leaves 69 MB a rank in /dev/shm; gloo does the same work.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        if "MASTER_PORT" not in os.environ:  # not before now: somebody else may take a port that is merely free
            os.environ["MASTER_PORT"] = str(_free_port())
        deepspeed.init_distributed(
            dist_backend="nccl" if cuda else "gloo",
            timeout=timedelta(seconds=timeout_s),
            auto_mpi_discovery=False,
            verbose=False,
        )
    return Runtime(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local_rank, device)


def free_memory(device: torch.device) -> None:
    """Frees what is no longer referred to, also in cycles, of which DeepSpeed's engine has many; the device's peak
    begins anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _keep_freed_memory() -> None:
    """Tells glibc to reuse freed memory instead of giving it back to the kernel.

    A step frees and allocates the same large buffers again and again, and the kernel would clear every page of
    them each time: on a CPU that is a good part of the step.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4  # from malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)


def _complete_environment() -> None:
    under_launcher = "RANK" in os.environ
    under_srun = not under_launcher and "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ
    for name, slurm_name in _RANK_VARIABLES.items():
        fallback = "1" if name == "WORLD_SIZE" else "0"
        os.environ.setdefault(name, os.environ[slurm_name] if under_srun else fallback)
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch. Dropout of a micro-batch is a function of its seed alone, so that no
    generator state has to be saved, on any number of ranks."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def world_size_of_environment() -> int:
    """How many ranks the launcher started, before any of them has joined."""
    _complete_environment()
    return int(os.environ["WORLD_SIZE"])


def default_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_main_rank(runtime: Runtime, work: Callable[[], None]) -> None:
    """Does ``work`` on the main rank; what goes wrong there is raised on every rank.

    Raises:
        UserError: of ``work``; an error of the file system is a StorageError.
    """
    problem: list[tuple[bool, str] | None] = [None]
    if runtime.is_main:
        try:
            work()
        except (UserError, OSError) as error:
            problem = [(isinstance(error, (StorageError, OSError)), str(error))]
    torch.distributed.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        is_storage, message = problem[0]
        raise (StorageError if is_storage else UserError)(message)
