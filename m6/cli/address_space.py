"""Refuses an address space too small for the libraries (``ulimit -v``)."""

import os
import resource

from m6.errors import UserError

# The smallest training maps 2.5 GiB on two cores, mostly for libraries and the heaps of their threads. With less,
# pyarrow may wait forever for a thread after a failed start, and extension modules end in errors of the interpreter.
_LIBRARIES, _THREAD = 4 << 30, 128 << 20


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
