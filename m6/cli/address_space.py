"""Refuses an address space in which the libraries cannot work."""

import resource

from m6.errors import UserError

# The smallest training maps up to 2.6 GiB, most of it libraries and the heaps of their threads. Below that, pyarrow may
# wait forever for a thread that could not be started, and extension modules end in errors of the interpreter.
_NEEDED = 4 << 30


def check_address_space() -> None:
    """Checks the limit of this process's address space.

    Raises:
        UserError: the limit is below 4 GiB.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _NEEDED:
        raise UserError(
            f"the address space is limited to {limit / 2**20:,.0f} MiB (ulimit -v), and m6 with its libraries needs at "
            f"least {_NEEDED / 2**20:,.0f} MiB; run ulimit -v unlimited first"
        )
