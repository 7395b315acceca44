"""``m6 serve``: serves a model over HTTP."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from m6.cli.options import DecodingWay, Passes, refuse_options
from m6.decoding import TEMPERATURE
from m6.errors import UserError

_LONGEST_DEADLINE = 86_400.0  # a day
_FOR_PICTURES = ("guidance", "temperature", "top_k", "top_p", "decoding", "passes")


def serve(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Option(help="the folder of a run, or of an exported model")],
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0: all of this machine")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free one")] = 8000,
    max_batch_size: Annotated[int, typer.Option(min=1, help="most requests of a batch")] = 16,
    max_waiting: Annotated[int, typer.Option(min=1, help="most requests in the queue; others get status 429")] = 64,
    deadline: Annotated[float, typer.Option(help="longest time of a request in seconds")] = 60.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest caption in tokens")] = 48,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: PyTorch's choice")] = None,
    guidance: Annotated[float, typer.Option(min=0.0, help="pictures: classifier-free guidance; 1: none")] = 2.0,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help=f"pictures: 0 is deterministic; default: the model's, {TEMPERATURE}"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="draw from the k most likely codes")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="draw from the fewest codes whose probabilities sum to p"),
    ] = None,
    decoding: DecodingWay = None,
    passes: Passes = None,
) -> None:
    """Serves a model over HTTP, with a demo page, until Ctrl-C or SIGTERM."""
    if not 0.001 <= deadline <= _LONGEST_DEADLINE:  # typer's own limits let nan pass
        raise UserError(f"serve: --deadline must be from 0.001 to {_LONGEST_DEADLINE:g} seconds, found {deadline}")
    for package in ("fastapi", "uvicorn", "python_multipart"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f'serve needs the package {package}: pip install "m6-recipes[serve]"')
    from m6.generation.sampling import Sampling
    from m6.serving.server import draws
    from m6.serving.server import serve as serve_folder

    sampling = Sampling(guidance, temperature, top_k, top_p, decoding, passes)
    if not draws(checkpoint):
        refuse_options(context, _FOR_PICTURES, f"is for pictures, which the model of {checkpoint} does not draw")
    serve_folder(
        checkpoint,
        host=host,
        port=port,
        max_batch_size=max_batch_size,
        max_waiting=max_waiting,
        deadline_s=deadline,
        max_new_tokens=max_new_tokens,
        threads=threads,
        sampling=sampling,
    )
