"""A process to decode images under limits of time and memory, effective even inside C libraries.

An SVG of a few bytes can cost cairo hours of work, and a progressive JPEG libjpeg. Python's signal handlers do not run
inside C code, so such files are decoded in a separate process. The kernel ends it when its processor time is spent.
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

CPU_SECONDS = 30  # for each image: a photograph of 50 million pixels takes 2 or 3
# Wall-clock limit. A busy machine needs longer than the processor time; a process stuck forever must end too.
_CLOCK_SECONDS = 20 * CPU_SECONDS
_MEMORY_BYTES = 8 << 30  # of address space, since libraries reserve some; the largest image takes 400 MB
TOO_LONG = f"takes longer than {CPU_SECONDS} s to decode"
TOO_MUCH_MEMORY = "takes too much memory to decode"

_decoders = threading.local()


class DecoderEnded(Exception):
    """The process ended without an answer; the message is the reason."""


def ask(data: bytes, image_size: int) -> tuple[dict[str, Any], bytes, bytes]:
    """Decodes an image by ``pictures.answer`` in the decoder process of this thread, started on demand.

    Returns:
        The result of ``pictures.answer``.

    Raises:
        DecoderEnded: a limit was reached, or the decoder crashed.
    """
    decoder: _Decoder | None = getattr(_decoders, "current", None)
    if decoder is None or decoder.owner != os.getpid():  # after a fork the decoder belongs to the parent
        decoder = _decoders.current = _Decoder()
    try:
        return decoder.ask(data, image_size)
    except BaseException:
        _decoders.current = None  # also after Ctrl-C: its late answer would be taken for the next image's
        decoder.end()
        raise


class _Decoder:
    def __init__(self) -> None:
        self.owner = os.getpid()
        self._connection: Connection
        self._connection, theirs = Pipe()
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()}, {CPU_SECONDS})"]
        # The decoder imports the same modules as this process.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        # Runs at the end of its thread, and at the end of this process.
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
    """The signal or exit code of an ended process, for messages."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-ended).name
    return f"exit code {ended}"


def serve(descriptor: int, cpu_seconds: int) -> None:
    """Answers the requests of ``ask`` until the other process is gone.

    Args:
        descriptor: file descriptor of the socket of requests.
        cpu_seconds: processor time for each request.
    """
    from m6.data.sources.pictures import answer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process
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
    """Sets a soft limit, at most the hard limit. The hard limit stays, so the soft limit can be raised again."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
