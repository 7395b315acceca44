"""Diagnostics of a hanging rank: the stacks of its threads and its last collectives.

The job scripts name a folder in M6_ATTEMPT_DIR. If a job makes no progress, they send SIGQUIT to all ranks and then end
the job. On this signal each rank writes its stacks to its log (stderr), and torch's flight recorder to the folder.
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
