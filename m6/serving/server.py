"""``m6 serve``: loads a model and serves it until it is stopped.

Connections are bounded in number and in the time of a request's headers.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import socket
from pathlib import Path
from typing import Any

import h11
import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from m6.checkpoints.finetuning import is_exported
from m6.checkpoints.loading import load_run_model
from m6.checkpoints.tokenizers import IMAGE_TOKENIZER
from m6.config.run import load_config
from m6.errors import UserError
from m6.generation.captioning import warn_unless_learned
from m6.generation.pipeline import M6TextToImagePipeline
from m6.generation.sampling import Sampling
from m6.runs.processes import default_device
from m6.serving.app import create_app
from m6.serving.batcher import Batcher, MeasuredTask, plan_by_arrival, plan_by_costs
from m6.serving.tasks import Captioning, Drawing

MAX_CONNECTIONS = 256
HEADER_SECONDS = 10.0
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: 34\r\n\r\n"
    b'{"detail": "too many connections"}'
)


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with limits for which uvicorn has no option.

    A connection beyond ``MAX_CONNECTIONS`` is answered with 503 and closed. After ``HEADER_SECONDS`` a connection is
    closed in two cases: the headers of its next request are incomplete, or it still sends the body of an answered
    request. uvicorn would keep such connections open for ever.
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
        """Stops the time when the headers are complete; starts it at the first byte outside of an open request."""
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


def serve(
    folder: Path,
    *,
    host: str,
    port: int,
    max_batch_size: int,
    max_waiting: int,
    deadline_s: float,
    max_new_tokens: int,
    sampling: Sampling,
    threads: int | None = None,
) -> None:
    """Serves the model of a run or of an exported folder until SIGTERM or Ctrl-C.

    On shutdown, accepted requests are still answered, for at most ``deadline_s``.

    Args:
        folder: a run, or a folder written by ``m6 export``.
        host: address to listen on.
        port: port to listen on; 0: any free port.
        max_batch_size: most requests of a batch.
        max_waiting: most requests in the queue.
        deadline_s: longest time of a request in seconds.
        max_new_tokens: longest caption in tokens.
        sampling: how image codes are drawn.
        threads: CPU threads of the model; None: PyTorch's choice.

    Raises:
        UserError: the folder holds no model, or the address cannot be used.
    """
    # The port is bound before the slow loading, so an address in use is reported at once.
    with _bind(host, port) as listener:
        if threads is not None:
            torch.set_num_threads(threads)
        device = default_device()
        drawing = None
        if draws(folder):
            drawing = Drawing(M6TextToImagePipeline.from_pretrained(folder, device), sampling)
            captioning = Captioning(drawing.pipeline.model, drawing.pipeline.processor, max_new_tokens)
        else:
            model, processor = load_run_model(folder, device)
            captioning = Captioning(model, processor, max_new_tokens)
        warn_unless_learned(captioning.model, folder, ["image_captioning", "visual_question_answering"], "texts")
        tasks: dict[str, MeasuredTask] = {"caption": captioning}
        if drawing is not None:
            tasks["generate"] = drawing
        plan = functools.partial(plan_by_arrival, max_batch_size=max_batch_size)
        batcher = Batcher({name: (task, plan) for name, task in tasks.items()}, max_waiting)
        background = functools.partial(plan_by_costs, batcher, tasks, max_batch_size)
        app = create_app(
            batcher, captioning, drawing, deadline_s=deadline_s, model_name=folder.resolve().name, background=background
        )
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            log_level="warning",
            timeout_graceful_shutdown=int(deadline_s) + 1,  # whole seconds, not less than the deadline
        )
        # After shutdown, uvicorn raises its stop signal again. Without these handlers this process would end with an
        # error.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        name = f"[{host}]" if ":" in host else host
        _Server(config, f"serving {folder} at http://{name}:{listener.getsockname()[1]}").run(sockets=[listener])


def draws(folder: Path) -> bool:
    """Whether the model of a run or of an exported folder has an image tokenizer; UserError if it holds no model."""
    if is_exported(folder):
        return (folder / IMAGE_TOKENIZER).is_dir()
    return load_config(folder / "config.json").m6.data.image_tokenizer is not None


class _Server(uvicorn.Server):
    """Prints its address once it listens."""

    def __init__(self, config: uvicorn.Config, message: str) -> None:
        super().__init__(config)
        self._message = message

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._message, flush=True)


def _bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket, not yet listening.

    Until uvicorn listens on it, connections are refused instead of waiting for the model.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        # Allows a restart while connections of the previous process are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except UnicodeError:  # a name with an empty or too long part
        raise UserError(f"cannot listen at {host}:{port}: no name of a host") from None
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return listener
