"""The causes of a command's fatal errors, and the report of an error to the Slurm job."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal

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


def tell_job(message: str, file: Literal["mistake", "over"] = "mistake") -> None:
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
