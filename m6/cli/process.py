"""What a command does to its process before it works: faster imports, its output, and enough address space."""

import contextlib
import gc
import io
import os
import resource
import sys
from collections.abc import Iterator

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
