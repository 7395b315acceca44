"""The intake of requests: reads their bodies and decodes them outside of the event loop, before they are queued.

Memory is bounded: the bodies of all requests together hold at most ``MAX_HELD_BYTES``, and at most ``NUM_THREADS``
bodies are decoded at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import Request
from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, parse_options_header

MAX_BODY_BYTES = 16 << 20
MAX_HELD_BYTES = 128 << 20
BODY_SECONDS = 20.0
NUM_THREADS = 2

Result = TypeVar("Result")


class BadInput(ValueError):
    """Invalid input from a client; the message names the problem."""


class BodyTooLarge(Exception):
    """A body is larger than its limit."""


class BodyTooSlow(Exception):
    """A body was not complete within ``BODY_SECONDS``."""


class TooManyBodies(Exception):
    """The bodies of all requests together hold ``MAX_HELD_BYTES``."""


class Intake:
    """Reads and decodes the bodies of requests within limits of memory and time."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="intake")

    @asynccontextmanager
    async def body(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """Yields the body of a request; its memory counts until the end of the context.

        Raises:
            BodyTooLarge: the body is larger than ``max_bytes``.
            BodyTooSlow: the body takes longer than ``BODY_SECONDS``.
            TooManyBodies: the bodies of other requests leave no room.
        """
        parts: list[bytes] = []
        try:
            try:
                await asyncio.wait_for(self._read(request, parts, max_bytes), BODY_SECONDS)
            except asyncio.TimeoutError:
                raise BodyTooSlow(f"the body of the request was not complete after {BODY_SECONDS:g} seconds") from None
            yield b"".join(parts)
        finally:
            self.held_bytes -= sum(map(len, parts))

    async def _read(self, request: Request, parts: list[bytes], max_bytes: int) -> None:
        # Read in parts: the size must be checked before the whole body is in memory.
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise BodyTooLarge(f"the body of the request is larger than {_in_units(max_bytes)}")
            if self.held_bytes + len(part) > MAX_HELD_BYTES:
                raise TooManyBodies("the bodies of other requests leave no memory for this one")
            parts.append(part)
            self.held_bytes += len(part)

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Calls a function in one of ``NUM_THREADS`` threads. A cancelled call is dropped if it has not begun."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        """Ends the threads after their running calls; waiting calls are dropped."""
        self._threads.shutdown(cancel_futures=True)


def uploaded_file(content_type: str, body: bytes) -> bytes:
    """Returns the file in a body: the body itself, or the one file of a ``multipart/form-data`` form.

    Raises:
        BadInput: the form is damaged, has other fields, or does not have exactly one file.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        return body
    files: list[File] = []
    fields: list[Field] = []
    try:
        # In memory: the limit of the body holds for its files.
        limits = {"MAX_MEMORY_FILE_SIZE": len(body)}
        parser = FormParser(
            "multipart/form-data", fields.append, files.append, boundary=options[b"boundary"], config=limits
        )
        parser.write(body)
        parser.finalize()
    except (FormParserError, KeyError) as error:
        raise BadInput(f"the form of the request cannot be read: {error or 'it names no boundary'}") from None
    if fields:
        name = (fields[0].field_name or b"").decode("utf-8", "replace")[:64]
        raise BadInput(
            f'the form of the request has the field "{name}", expected the picture alone; parameters belong to the '
            "query, as in /caption?max_new_tokens=24"
        )
    if len(files) != 1:
        raise BadInput(f"the form of the request has {len(files)} files, expected one, as curl -F picture=@FILE sends")
    file = files[0].file_object
    file.seek(0)
    return file.read()


def _in_units(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"
