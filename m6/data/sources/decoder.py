"""A process that decodes pictures under limits of time and memory, which hold inside of C libraries too.

A drawing of a few bytes can ask cairo for hours of work, and a progressive JPEG libjpeg. No handler of a signal runs
there, so such a file is decoded in a process of its own: the kernel ends it when its processor time is spent.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

CPU_SECONDS = 30  # of a picture: a photograph of 50 million pixels takes 2 or 3
# A machine with much else to do takes longer; a process that waits for ever is ended as well.
_CLOCK_SECONDS = 20 * CPU_SECONDS
_MEMORY_BYTES = 8 << 30  # of addresses, of which libraries reserve some; the largest picture takes 400 MB
TOO_LONG = f"takes longer than {CPU_SECONDS} s to decode"
TOO_MUCH_MEMORY = "takes too much memory to decode"

_decoders = threading.local()


class DecoderEnded(Exception):
    """The process ended before it answered; the message is the reason."""


def ask(data: bytes, image_size: int) -> tuple[dict[str, Any], bytes, bytes]:
    """Has a picture decoded by ``pictures.answer`` in the process of this thread, which is started when there is none.

    Returns:
        What ``pictures.answer`` does.

    Raises:
        DecoderEnded: a limit was reached, or the decoder crashed.
    """
    decoder: _Decoder | None = getattr(_decoders, "current", None)
    if decoder is None or decoder.owner != os.getpid():  # after a fork it is another process's
        decoder = _decoders.current = _Decoder()
    try:
        return decoder.ask(data, image_size)
    except BaseException:
        _decoders.current = None  # also after Ctrl-C: its answer would be taken for that of the next picture
        decoder.end()
        raise


class _Decoder:
    def __init__(self) -> None:
        self.owner = os.getpid()
        self._connection: Connection
        self._connection, theirs = Pipe()
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()}, {CPU_SECONDS})"]
        # The modules of this process, wherever it was started.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        # When its thread ends, and when this process does.
        self.end = weakref.finalize(self, _end, self.owner, self._process, self._connection)

    def ask(self, data: bytes, image_size: int) -> tuple[dict[str, Any], bytes, bytes]:
        try:
            self._connection.send_bytes(image_size.to_bytes(8, "little"))
            self._connection.send_bytes(data)
            if not self._connection.poll(_CLOCK_SECONDS):
                raise DecoderEnded(TOO_LONG)
            described = json.loads(self._connection.recv_bytes())
            return described, self._connection.recv_bytes(), self._connection.recv_bytes()
        except (EOFError, OSError):
            ended = self._process.wait()
            if ended == -signal.SIGXCPU:
                raise DecoderEnded(TOO_LONG) from None
            raise DecoderEnded(f"ends the decoder ({_name_of(ended)})") from None


def _end(owner: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    if owner == os.getpid():
        process.kill()
        process.wait()


def _name_of(ended: int) -> str:
    """What ended a process, by its return code."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-ended).name
    return f"exit code {ended}"


def serve(descriptor: int, cpu_seconds: int) -> None:
    """Answers the questions of ``ask`` until the process that asks is gone.

    Args:
        descriptor: of the socket by which they come.
        cpu_seconds: processor time for each.
    """
    from m6.data.sources.pictures import answer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that asks
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    connection = Connection(descriptor)
    while True:
        try:
            image_size = int.from_bytes(connection.recv_bytes(), "little")
            data = connection.recv_bytes()
        except (EOFError, OSError):
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + cpu_seconds + 1)
        described, pixels, rendered = answer(data, image_size)
        connection.send_bytes(json.dumps(described).encode())
        connection.send_bytes(pixels)
        connection.send_bytes(rendered)


def _limit(kind: int, value: int) -> None:
    """Sets a limit that can be raised again, unless a lower one is set already."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
