"""What a rank that hangs can still tell: the stacks of its threads, and its last collectives.

The job scripts name a folder in M6_ATTEMPT_DIR and send SIGQUIT to all ranks before they end a step that stands
still. Each rank then writes its stacks to stderr, which is its log, and torch's flight recorder to the folder.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of builds with and without NCCL


def answer_sigquit() -> None:
    """From now on SIGQUIT asks for evidence; does nothing outside of a job script.

    The stacks are written by a handler in C, which runs whatever the interpreter is doing. It passes the signal
    on to Python's, whose byte in the pipe wakes a thread that writes the flight recorder.
    """
    folder = os.environ.get("M6_ATTEMPT_DIR")
    if not folder:
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGQUIT, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGQUIT, file=sys.stderr, all_threads=True, chain=True)
    rank = int(os.environ.get("SLURM_PROCID", "0"))
    path = Path(folder) / f"flight_recorder_{rank:05d}.json"
    threading.Thread(target=_write_on_sigquit, args=(reading, path), name="evidence", daemon=True).start()


def _write_on_sigquit(reading: int, path: Path) -> None:
    while number := os.read(reading, 1):
        if number[0] == signal.SIGQUIT:
            write_flight_recorder(path)


def write_flight_recorder(path: Path) -> None:
    """Writes the last collectives of this rank as JSON; TORCH_FR_BUFFER_SIZE says how many it keeps."""
    if "torch" not in sys.modules:  # asked while torch was being imported: there were no collectives
        return
    from torch._C import _distributed_c10d

    for name in _RECORDERS:
        if dump := getattr(_distributed_c10d, name, None):
            path.write_bytes(dump())
            return
