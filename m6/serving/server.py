"""``m6 serve``: loads a model, measures the cost of batches, and serves until it is stopped."""

from __future__ import annotations

import functools
import signal
import socket
from pathlib import Path

import uvicorn

from m6.checkpoints.loading import IMAGE_TOKENIZER, is_exported, load_run_model
from m6.config.run import load_config
from m6.errors import UserError
from m6.generation.pipeline import M6TextToImagePipeline
from m6.generation.text_to_image import Sampling
from m6.runs.processes import default_device
from m6.serving.app import create_app
from m6.serving.batcher import Batcher, Task
from m6.serving.batching import BatchPlanner, cost_grid, measure_costs, plan_by_length
from m6.serving.tasks import Captioning, Drawing


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
) -> None:
    """Serves the model of a run or of an exported folder until SIGTERM or Ctrl-C.

    On shutdown, the requests that were accepted before are still answered, for at most ``deadline_s``.

    Args:
        folder: a run, or a folder that ``m6 export`` wrote.
        host: address to listen on.
        port: port to listen on; 0: any free port.
        max_batch_size: most requests of a batch.
        max_waiting: most requests in the queue.
        deadline_s: longest time of a request in seconds.
        max_new_tokens: longest caption in tokens.
        sampling: how image codes are drawn.

    Raises:
        UserError: the folder holds no model, or the address cannot be used.
    """
    # The port is bound before the slow loading, so an address in use is reported at once.
    with _bind(host, port) as listener:
        device = default_device()
        drawing = None
        if _has_image_tokenizer(folder):
            drawing = Drawing(M6TextToImagePipeline.from_pretrained(folder, device), sampling)
            captioning = Captioning(drawing.pipeline.model, drawing.pipeline.processor, max_new_tokens)
        else:
            model, processor = load_run_model(folder, device)
            captioning = Captioning(model, processor, max_new_tokens)
        print(f"measuring what batches of up to {max_batch_size} requests cost", flush=True)
        lanes: dict[str, tuple[Task, BatchPlanner]] = {"caption": (captioning, _plan(captioning, max_batch_size))}
        if drawing is not None:
            lanes["generate"] = (drawing, _plan(drawing, max_batch_size))
        app = create_app(Batcher(lanes, max_waiting), captioning, drawing, deadline_s=deadline_s)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(deadline_s) + 1)
        print(f"serving {folder} at http://{host}:{listener.getsockname()[1]}", flush=True)
        # After shutdown, uvicorn raises the signal that stopped it again, which would end this process with an error.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        uvicorn.Server(config).run(sockets=[listener])


def _has_image_tokenizer(folder: Path) -> bool:
    if is_exported(folder):
        return (folder / IMAGE_TOKENIZER).is_dir()
    return load_config(folder / "config.json").m6.data.image_tokenizer is not None


def _plan(task: Captioning | Drawing, max_batch_size: int) -> BatchPlanner:
    costs = measure_costs(task.run_synthetic, *cost_grid(1, task.max_length, max_batch_size))
    return functools.partial(plan_by_length, seconds=costs, max_batch_size=max_batch_size)


def _bind(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not listen yet.

    Until uvicorn listens on it, connections are refused instead of waiting for the model.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        # Allows a restart while connections of the previous process are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return listener
