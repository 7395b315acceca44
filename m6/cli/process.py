"""What a command does to its process before it works, and what it does with an error that ends it."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from m6.errors import UserError

# The smallest training maps 2.5 GiB on two cores, mostly for libraries and the heaps of their threads. With less,
# pyarrow may wait forever for a thread after a failed start, and extension modules end in errors of the interpreter.
_LIBRARIES, _THREAD = 4 << 30, 128 << 20


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Turns garbage collection off inside ``with``: torch and transformers make many objects, and all of them stay.

    Collections would take a seventh of the time of the imports. Afterwards all objects are frozen: later collections
    skip them, and that saves half a second.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def keep_bars_out_of_logs() -> None:
    """Turns off the progress bars of Hugging Face's packages where stderr is no terminal.

    It has to run before their import.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also those of transformers
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def print_any_name() -> None:
    """Lets stdout write file names outside of UTF-8, as their bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":  # otherwise the user's choice
        sys.stdout.reconfigure(errors="surrogateescape")


def needed_bytes() -> int:
    """The smallest address space in bytes: the libraries, and one thread with its stack and heap for each core."""
    return _LIBRARIES + (os.cpu_count() or 1) * _THREAD


def check_address_space() -> None:
    """Checks the limit of this process's address space.

    Raises:
        UserError: the limit is below ``needed_bytes``.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < needed_bytes():
        raise UserError(
            f"the address space is limited to {limit / 2**20:,.0f} MiB (ulimit -v), and m6 with its libraries needs at "
            f"least {needed_bytes() / 2**20:,.0f} MiB on this machine; run ulimit -v unlimited first"
        )


# Disk full, quota exceeded, file larger than the limit of the process, read-only file system, no memory.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENOMEM)


def is_full_disk(error: BaseException | None) -> bool:
    """Whether the disk is the cause of an error, also if a library raised another error from it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL_DISK:
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python or in a library."""
    # PyTorch has a type of its own for GPUs only; its allocator of host memory raises a plain RuntimeError. The loader
    # of shared libraries raises ImportError.
    signs = (
        "can't allocate memory",
        "out of memory",
        "failed to map segment",
        "annot allocate memory",
        "start new thread",
    )
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def report_to_job(message: str, file: Literal["mistake", "over"] = "mistake") -> None:
    """Writes the message to the attempt's folder, if this is an attempt of a Slurm job. The job then ends.

    Args:
        file: mistake: another attempt would fail in the same way; over: nothing is left to do.
    """
    attempt = os.environ.get("M6_ATTEMPT_DIR")
    if attempt:
        from m6.files import write_text

        # The cause may be one faulty node of several, such as a missing mount, so its name is part of the message.
        several = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1
        place = f" (said on {os.environ.get('SLURMD_NODENAME')})" if several and file == "mistake" else ""
        write_text(Path(attempt, file), f"{message}{place}\n")
