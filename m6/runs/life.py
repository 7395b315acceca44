"""Tells which rank was lost: those that survive it get an error of a connection, which names nobody."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from m6.errors import RetryableError, UserError
from m6.runs.processes import Runtime

# How often a rank shows that it lives, and how long it may be silent. Launchers kill survivors after half a minute.
_BEAT_S, _SILENT_S = 4.0, 14.0
# How long a process that was killed may take to end.
_DYING_S, _POLL_S = 3.0, 0.1
# How long a rank that was not told of a loss goes on after it: most get an error within that time, and name the rank.
_UNTOLD_S = 20.0
# How long rank 0 stays for the others after its work.
_LAST_S = 60.0
_NUMBERS = itertools.count()
# How many of the reasons that ranks left are read.
_REASONS = 16
# What errors of gloo, NCCL and the store of the process group speak of.
_OF_TIME = ("timed out", "timeout")
_OF_CONNECTIONS = ("gloo", "nccl", "connection", "socket", "store", "peer", *_OF_TIME)
_SOURCES = tuple(str(Path(__file__).resolve().parents[2] / name) + os.sep for name in ("m6", "moe", "offload"))
# A main thread in these files waits for other ranks; the second times the waits, and the third looks for the lost.
_WAITING = (f"{os.sep}torch{os.sep}distributed{os.sep}", str(Path("m6", "training", "reporting", "ranks.py")), __file__)


class LifeSigns:
    """Shows the other ranks that this one lives, and tells whose signs have ended.

    Ranks of one machine see each other's processes. Of a rank elsewhere they see a number in the store of the process
    group, which it counts up, and with it the place in the program unless it waits for others. A rank that ends with
    an error leaves its reason there.

    No error of a connection reaches a rank that waits in the store, as all do while groups are made: it would hang
    until the time-out. So a thread looks for ranks that are gone, and ends such a process with their names.

    Every rank makes this object.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._over, self._leaving = runtime, threading.Event(), threading.Event()
        self._alone = runtime.world_size == 1
        self._has_store = not self._alone
        if self._alone:
            return
        # A connection of its own: another thread's waiting would keep the beats back. And a name of its own: a process
        # may train several runs after another, of which one may have ended with an error.
        connection = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store: dist.Store = dist.PrefixStore(f"m6_signs_{next(_NUMBERS)}", connection)
        self._beat(0)
        processes: list[tuple[str, int, str | None]] = [("", 0, None)] * runtime.world_size
        own = (_machine(), os.getpid(), _start_of(os.getpid()))
        dist.all_gather_object(processes, own)
        self._seen = {
            rank: (process, begun)
            for rank, (machine, process, begun) in enumerate(processes)
            if rank != runtime.rank and machine == own[0] and _is_seen(process, begun)
        }
        self._unseen = [rank for rank in range(runtime.world_size) if rank not in {runtime.rank, *self._seen}]
        threading.Thread(target=self._go_on, name="life signs", daemon=True).start()

    @contextlib.contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Turns the error of a connection to a rank that was lost into one that names the rank.

        Raises:
            RetryableError: the ranks that were lost, with their nodes and with the reasons that they left.
        """
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            of_connection = any(sign in text for sign in _OF_CONNECTIONS)
            # Not those of a kernel or of a data worker, which say nothing about the other ranks.
            of_time = any(sign in text for sign in _OF_TIME) and ("gloo" in text or isinstance(error, dist.DistError))
            self._leaving.set()
            lost = self._lost(of_time) if of_connection and not isinstance(error, torch.OutOfMemoryError) else {}
            self._leave(str(error), list(lost))
            if not lost:
                raise
            raise RetryableError("; ".join(map(self._in_words, lost, lost.values()))) from error
        except BaseException as error:
            self._leave(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}", [])
            raise

    def close(self) -> None:
        """Ends the signs, and says that this rank needs no other any more.

        Rank 0 may have the store in its process: it waits a while for the others, which could not tell its end from a
        loss without the store.
        """
        self._over.set()
        if self._has_store:
            with self._asking():
                self._store.set(f"m6_over/{self._runtime.rank}", "")
                if self._runtime.rank == 0 and not self._leaving.is_set():
                    others = [f"m6_over/{rank}" for rank in range(1, self._runtime.world_size)]
                    self._store.wait(others, timedelta(seconds=_LAST_S))

    def _go_on(self) -> None:
        number, found_at = 0, None
        while not self._over.wait(_BEAT_S):
            number += 1
            if self._has_store:
                with self._asking():
                    self._beat(number)
            if not (gone := self._gone()) or self._leaving.is_set():
                found_at = None
            elif found_at is None:
                found_at = time.monotonic()
            elif time.monotonic() > found_at + _UNTOLD_S:
                self._end_untold(gone)

    def _end_untold(self, gone: dict[int, str]) -> None:
        """Ends this process, whose main thread may wait for ever in a library."""
        message = "; ".join(map(self._in_words, gone, gone.values()))
        self._leave(message, list(gone))
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)

    def _beat(self, number: int) -> None:
        self._store.set(f"m6_beat/{self._runtime.rank}", f"{number} {_place()}")

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # the store is gone: the library writes a stack for each further question
            self._has_store = False

    def _leave(self, reason: str, lost: list[int]) -> None:
        """Tells why this rank ends; ``lost`` are the ranks without which it cannot go on."""
        self._leaving.set()
        if self._has_store:
            with self._asking():
                number = self._store.add("m6_left", 1)
                self._store.set(f"m6_left/{number}", json.dumps([self._runtime.rank, reason, lost]))

    def _lost(self, after_timeout: bool) -> dict[int, str]:
        """The ranks that were lost, each with its reason if it left one. It takes seconds.

        Args:
            after_timeout: a collective timed out. Ranks whose process exists may be stopped, or hang elsewhere.
        """
        if self._alone:
            return {}
        others = [rank for rank in range(self._runtime.world_size) if rank != self._runtime.rank]
        asked = others if after_timeout else self._unseen
        beats = self._beats(asked)
        silent_at = time.monotonic() + (_SILENT_S if asked else _DYING_S)
        while time.monotonic() < silent_at:
            if gone := self._gone():
                return gone
            time.sleep(_POLL_S)
        later = self._beats(asked)
        if silent := [rank for rank in asked if rank not in later or later[rank] == beats.get(rank)]:
            return dict.fromkeys(silent, "")
        places = {rank: later[rank].partition(" ")[2] for rank in asked if after_timeout}
        return {
            rank: f"the others waited for it in vain, and it is in {place}" for rank, place in places.items() if place
        }

    def _gone(self) -> dict[int, str]:
        """The ranks of which is certain that they ended before their work did, each with its reason if it left one."""
        left = {
            rank: (reason, [other for other in lost if other != self._runtime.rank])
            for rank, (reason, lost) in self._reasons().items()
        }
        gone = {rank for rank in self._seen if self._ended(rank) and not self._is_over(rank)} | left.keys()
        # Whoever left because of another rank was not lost itself.
        named = {other for _, lost in left.values() for other in lost}
        found = (gone - {rank for rank, (_, lost) in left.items() if lost}) | named
        return {rank: left[rank][0] if rank in left else "" for rank in sorted(found)}

    def _is_over(self, rank: int) -> bool:
        if self._has_store:
            with self._asking():
                return bool(self._store.check([f"m6_over/{rank}"]))
        return False

    def _beats(self, ranks: list[int]) -> dict[int, str]:
        """What ranks show: a number, and their place. If the store went with rank 0: of all others an ever new one."""
        if self._has_store:
            with self._asking():
                beats = self._store.multi_get([f"m6_beat/{rank}" for rank in ranks]) if ranks else []
                return {rank: beat.decode() for rank, beat in zip(ranks, beats, strict=True)}
        return {rank: os.urandom(8).hex() for rank in ranks if rank > 0}

    def _reasons(self) -> dict[int, tuple[str, list[int]]]:
        """Why the first ranks ended, and which others they missed."""
        found: dict[int, tuple[str, list[int]]] = {}
        if self._has_store:
            with self._asking():
                for number in range(1, min(self._store.add("m6_left", 0), _REASONS) + 1):
                    if self._store.check([key := f"m6_left/{number}"]):
                        rank, reason, lost = json.loads(self._store.get(key))
                        found[rank] = reason, lost
        return found

    def _ended(self, rank: int) -> bool:
        process, begun = self._seen[rank]
        try:
            return _start_of(process) != begun
        except OSError:  # such as too many open files: nobody knows
            return False

    def _in_words(self, rank: int, reason: str) -> str:
        return f"{self._runtime.name_of(rank)} was lost" + (f": {reason}" if reason else "; its own log may say why")


def _place() -> str:
    """Where the main thread is, such as "m6/data/reader.py, line 80 (_read)"; empty while it waits for other ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _WAITING):
            return ""
        if file.startswith(_SOURCES):
            return f"{Path(file).relative_to(Path(_SOURCES[0]).parent)}, line {frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def _machine() -> str:
    """What tells this machine, as its processes see each other, from others."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.environ.get('SLURMD_NODENAME', '')}"
    return platform.node()


def _is_seen(process: int, begun: str | None) -> bool:
    """Whether this process sees another one, which began at that time."""
    with contextlib.suppress(OSError):
        return begun is not None and _start_of(process) == begun
    return False


def _start_of(process: int) -> str | None:
    """The time at which a process of this machine began; None if it has ended.

    Raises:
        OSError: it cannot be seen.
    """
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 22 of proc(5); a zombie has ended, and its parent has not noticed yet.
    return None if state in "ZX" else fields[18]
