"""Connections that are bounded in number and in the time they may take to send a request's headers."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
HEADER_SECONDS = 10.0

_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: 34\r\n\r\n"
    b'{"detail": "too many connections"}'
)


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with the limits that uvicorn has no option for.

    A connection beyond ``MAX_CONNECTIONS`` is answered with 503 and closed. A connection whose next request does not
    have all its headers after ``HEADER_SECONDS`` is closed, and one that goes on for as long with the body of a request
    that is answered already: uvicorn would keep them open for ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the time of the headers, or refuses the connection."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Stops the time when the headers are complete; starts it at the first byte that belongs to no open request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._stop_timer()
        elif self._header_timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
