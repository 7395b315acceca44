"""``m6 serve``: loads a model, measures what batches cost, listens until it is told to stop."""

from __future__ import annotations

import functools
import signal
import socket
from pathlib import Path

import torch
import uvicorn

from m6.errors import UserError
from m6.export import load_run_model
from m6.serving.app import create_app
from m6.serving.batcher import Batcher
from m6.serving.batching import cost_grid, measure_costs, plan_by_length
from m6.serving.tasks import Captioning


def serve(
    folder: Path, *, host: str, port: int, max_batch_size: int, max_waiting: int, deadline_s: float, max_new_tokens: int
) -> None:
    """Serves the model of a run or of an exported folder until SIGTERM or Ctrl-C.

    Requests that were taken by then are answered, unless that takes longer than ``deadline_s``.

    Raises:
        UserError: the folder holds no model, or the address cannot be listened at.
    """
    with _bind(host, port) as listener:
        model, processor = load_run_model(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        captioning = Captioning(model, processor, max_new_tokens)
        costs = measure_costs(captioning.try_out, *cost_grid(1, max_new_tokens, max_batch_size))
        plan = functools.partial(plan_by_length, seconds=costs, max_batch_size=max_batch_size)
        batcher = Batcher({"caption": (captioning, plan)}, max_waiting)
        app = create_app(batcher, captioning, deadline_s=deadline_s)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(deadline_s) + 1)
        print(f"serving {folder} at http://{host}:{listener.getsockname()[1]}", flush=True)
        # uvicorn raises the signals that stopped it once more when it is done; nothing is left to do then.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        uvicorn.Server(config).run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until the model is ready, clients are refused rather than kept."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return listener
