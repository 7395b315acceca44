"""Where the processes of a run meet before they form their process group.

A process whose own configuration is wrong ends before it comes. torchrun and the job scripts then end the others.
Another launcher may not: they would wait in the library as long as in a collective, and its error names nobody.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from m6.errors import RetryableError, UserError, first_line

MEETING_TIMEOUT_S = 600.0
"""How long the processes of a run wait for each other at the start. The imports of some nodes may take minutes."""
_SHORTEST_S, _LONGEST_S = 0.01, 1.0  # pauses between two questions
# The most missing ranks in a message.
_NAMED = 4
_HERE, _SIZE, _COUNT, _ALL, _WHY_NOT = "here", "size", "count", "all", "why_not"


def meet(rank: int, world_size: int, timeout_s: float = MEETING_TIMEOUT_S) -> dist.Store:
    """Waits until all processes of the run have come to MASTER_ADDR and MASTER_PORT; returns the store that they share.

    Args:
        timeout_s: how long to wait.

    Raises:
        UserError: MASTER_PORT is no port, or another process has this rank or another WORLD_SIZE.
        RetryableError: processes did not come, with their number and some of their ranks.
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
    except RuntimeError as error:
        raise RetryableError(
            f"{came} of {world_size} ranks had come to {address}:{port} when the process that listens there, of rank 0 "
            f"or of torchrun, ended ({first_line(error)}); its log may say why"
        ) from None
    if serves:
        time.sleep(2 * _LONGEST_S)  # the others read it here
    raise RetryableError(why_not)


def _introduce(store: dist.Store, rank: int, world_size: int) -> None:
    """Writes down that this process is the rank; ends all processes if another one contradicts it."""
    own = f"process {os.getpid()} on {os.environ.get('SLURMD_NODENAME') or platform.node()}"
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
