"""Signals to a rank, and diagnostics of a hanging one: the stacks of its threads and its last collectives.

A request to stop or save only sets a flag, and all ranks act on it together at the end of a step. If the launcher dies,
its ranks die too.

The job scripts name a folder in M6_ATTEMPT_DIR. If a job makes no progress, they send SIGQUIT to all ranks and then end
the job. On this signal each rank writes its stacks to its log (stderr), and torch's flight recorder to the folder.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from m6.data.workers import end_with_parent

# torchrun and the deepspeed launcher set one of these variables for their processes.
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")


def stopping_signals() -> tuple[signal.Signals, ...]:
    """The signals by which a rank is asked to save and end.

    Under srun SIGTERM is not one of them: srun sends it after another rank failed, and a save would wait for that rank.
    """
    signals = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    return signals if "SLURM_STEP_ID" in os.environ else (*signals, signal.SIGTERM)


def end_with_launcher() -> None:
    """Asks Linux to kill this rank when its launcher dies; does nothing for a process without a launcher.

    torchrun and deepspeed end their ranks when they are told to end. A killed launcher cannot, and its ranks would
    train on concurrently with the next attempt.
    """
    if any(name in os.environ for name in _LAUNCHERS):
        end_with_parent()


@dataclass(frozen=True)
class Requests:
    """The requests to a rank during a step. All ranks act on the request of any rank."""

    stop: bool = False
    save: bool = False

    @classmethod
    def of_all(cls, requests: Iterable[Requests]) -> Requests:
        """The union of the requests of several ranks."""
        found = list(requests)
        return cls(stop=any(each.stop for each in found), save=any(each.save for each in found))


class StopFlag:
    """A flag, set on this rank by a stop signal. The loop reduces it together with the sums of the step.

    Create it before slow imports: a signal without a handler ends the process.

    Attributes:
        raised: whether a signal has arrived.
    """

    def __init__(self) -> None:
        self.raised = False
        self._numbers = stopping_signals()
        for number in self._numbers:
            signal.signal(number, self._raise)

    def ignore(self) -> None:
        """Ignores the signals from now on, so a repeated one does not interrupt the exit."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.raised and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C ends the process at once
        self.raised = True


_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of builds with and without NCCL


def answer_sigquit() -> None:
    """Installs a SIGQUIT handler for these diagnostics; does nothing outside of a job script.

    A handler in C writes the stacks, since Python's own handlers do not run while a rank hangs in a C call. It passes
    the signal on to Python. Python's C handler writes a byte to a pipe, and a thread reads the byte and writes the
    flight recorder.
    """
    folder = os.environ.get("M6_ATTEMPT_DIR")
    if not folder:
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # set_wakeup_fd requires it
    # Without a Python handler, the interpreter writes nothing to the wake-up pipe.
    signal.signal(signal.SIGQUIT, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGQUIT, file=sys.stderr, all_threads=True, chain=True)
    rank = int(os.environ.get("SLURM_PROCID", "0"))
    path = Path(folder) / f"flight_recorder_{rank:05d}.json"
    # A daemon: it must not keep a finished process alive.
    threading.Thread(target=_write_on_sigquit, args=(read_end, path), name="evidence", daemon=True).start()


def _write_on_sigquit(read_end: int, path: Path) -> None:
    while number := os.read(read_end, 1):
        if number[0] == signal.SIGQUIT:
            write_flight_recorder(path)


def write_flight_recorder(path: Path) -> None:
    """Writes the last collectives of this rank as JSON; TORCH_FR_BUFFER_SIZE sets their number."""
    if "torch" not in sys.modules:  # the signal arrived before the import of torch: there were no collectives
        return
    from torch._C import _distributed_c10d

    for name in _RECORDERS:
        if dump := getattr(_distributed_c10d, name, None):
            path.write_bytes(dump())
            return
