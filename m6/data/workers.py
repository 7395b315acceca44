"""Worker processes of the data loader: their number, their start and end, and their messages."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Iterable, Iterator
from typing import Any

from m6.errors import RetryableError, StorageError, UserError
from m6.formatting import format_bytes

_PER_CORE, _FEWEST = 4, 16  # most processes for each core of a rank; number allowed on any machine
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_SHARED_MEMORY = "/dev/shm"


def usable_cores() -> int:
    """The number of cores usable by this process. In a cluster job it may be less than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_number(key: str, number: int, cores: int) -> None:
    """Raises UserError for too many processes or threads for the cores.

    Thousands would use up the memory of the machine before the first batch.

    Args:
        key: key of the number in the configuration, for the message.
        cores: number of usable cores.
    """
    limit = max(_FEWEST, _PER_CORE * cores)
    if number > limit:
        raise UserError(f"{key} is {number:,}; expected at most {limit} on {cores} core{'' if cores == 1 else 's'}")


def end_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies in any way; does nothing on other systems."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prepared(
    dataset: Any, indices: Iterable[int], key: str, num_workers: int, pin_memory: bool = False
) -> Iterator[Any]:
    """Yields the items of a data set in the order of ``indices``. Worker processes prepare them ahead of time.

    Args:
        dataset: returns a dataclass with tensors for an index. It returns a UserError instead of raising it: a worker
            would turn a raised error into a traceback.
        key: key of ``num_workers`` in the configuration, for messages.
        num_workers: number of worker processes; 0: this process prepares the items.
        pin_memory: whether tensors come in pinned memory.

    Raises:
        UserError: returned by the data set.
        StorageError: the workers cannot be started, or cannot pass a batch on.
        RetryableError: a worker was killed.
    """
    import torch
    from torch.utils.data import DataLoader

    loader: DataLoader[Any] = DataLoader(
        dataset,
        sampler=indices,
        batch_size=None,
        collate_fn=_shared,
        num_workers=num_workers,
        worker_init_fn=start_worker,
        pin_memory=pin_memory,
        # By default the loader draws a seed from the global generator. This would change the run's dropout.
        generator=torch.Generator(),
    )
    with naming_the_start(key, num_workers, 0), _unfinished_without_traceback():
        batches = iter(loader)
    while True:
        with _naming_the_lost(key, num_workers):
            try:
                batch = next(batches)
            except StopIteration:
                return
        if isinstance(batch, _NoRoom):
            raise StorageError(f"{key} is {num_workers}: {batch}")
        if isinstance(batch, UserError):
            raise batch
        yield batch


def start_worker(worker: int) -> None:
    """A ``worker_init_fn``: shields a worker from signals for the run, and ends it with its trainer.

    ``timeout`` and service managers send SIGTERM to the whole process group. In PyTorch a worker then ends, and a run
    waiting for its batch would fail instead of saving a checkpoint.
    """
    os.setpgid(0, 0)
    end_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # the parent died before the call above
        os._exit(1)


class _NoRoom(StorageError):
    """A batch could not be moved to shared memory."""


def _shared(batch: Any) -> Any:
    """A ``collate_fn``: moves the tensors of a worker's batch to shared memory, on their way to the trainer.

    PyTorch would do so in a thread of the worker's queue. If it fails there, the thread prints a traceback and drops
    the batch, and the trainer waits for it forever.
    """
    from torch import Tensor
    from torch.utils.data import get_worker_info

    if get_worker_info() is None or isinstance(batch, UserError):
        return batch
    tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)]
    try:
        for tensor in tensors:
            tensor.share_memory_()
    except (RuntimeError, OSError) as error:
        number = re.search(r"\((\d+)\)\s*$", str(error))
        reason = os.strerror(int(number[1])) if number else str(error)
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        return _NoRoom(f"a batch of {format_bytes(size)} does not reach the training: {reason}; {_remedy()}")
    return batch


def _remedy(harmless: int = 0) -> str:
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(_SHARED_MEMORY)
        return (
            f"processes share batches in {_SHARED_MEMORY}, which has {format_bytes(usage.free)} of "
            f"{format_bytes(usage.total)} free: empty it, give the container more (docker run "
            f"--shm-size), or use fewer processes; {harmless} needs none of it"
        )
    return f"processes share batches in {_SHARED_MEMORY}, which is not there; {harmless} needs none of it"


@contextlib.contextmanager
def naming_the_start(key: str, number: int, harmless: int) -> Iterator[None]:
    """Turns errors of the semaphores of processes in a full /dev/shm, or of too many processes, into a StorageError.

    Args:
        key: key or option of the number of processes, for the message.
        number: number of processes.
        harmless: the value for which no process is started.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = (
            "use fewer processes" if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE) else _remedy(harmless)
        )
        raise StorageError(f"{key} is {number}; these processes cannot be started: {reason}; {remedy}") from None


@contextlib.contextmanager
def _unfinished_without_traceback() -> Iterator[None]:
    """The destructor of an unfinished iterator of a loader would print a traceback."""
    try:
        yield
    except OSError:
        from torch.utils.data import dataloader

        dataloader._MultiProcessingDataLoaderIter._shutdown = True  # an attribute that the destructor reads
        raise


@contextlib.contextmanager
def _naming_the_lost(key: str, num_workers: int) -> Iterator[None]:
    """Turns the error of a killed worker into a RetryableError with the key's name."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise RetryableError(
            f"{key} is {num_workers}, and one of these processes was killed, as happens where memory is short: {error}"
        ) from None
