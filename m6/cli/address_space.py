"""Refuses an address space in which the libraries cannot work."""

import os
import resource

from m6.errors import UserError

# The smallest training maps 2.5 GiB on two cores, most of it libraries and the heaps of their threads. With less,
# pyarrow may wait forever for a thread that could not be started, and extension modules end in errors of the
# interpreter.
_LIBRARIES, _THREAD = 4 << 30, 128 << 20


def needed_bytes() -> int:
    """The smallest address space: the libraries, and on each core a thread with a stack and a heap of its own."""
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
