"""``m6 serve``: a model behind HTTP."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Optional

import typer

from m6.errors import UserError


def serve(
    checkpoint: Annotated[Path, typer.Option(help="the folder of a run, or of an exported model")],
    host: Annotated[str, typer.Option(help="address to listen at; 0.0.0.0 is every one of this machine")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    max_batch_size: Annotated[int, typer.Option(min=1, help="most requests that run together")] = 16,
    max_waiting: Annotated[int, typer.Option(min=1, help="most requests that wait; one more gets status 429")] = 64,
    deadline: Annotated[float, typer.Option(min=0.001, help="longest that a request may take, in seconds")] = 60.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest description")] = 48,
    guidance: Annotated[float, typer.Option(min=0.0, help="of pictures: classifier-free guidance; 1 is none")] = 3.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="of pictures; 0 is deterministic")] = 1.0,
    top_k: Annotated[Optional[int], typer.Option(min=1, help="draw from the k best codes")] = None,  # noqa: UP045
    top_p: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="draw from the fewest codes whose probabilities sum to p"),
    ] = None,
) -> None:
    """Serves a model over HTTP, with a page to try it on, until Ctrl-C or SIGTERM."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f'serve needs the package {package}: pip install "m6-recipes[serve]"')
    from m6.generation.text_to_image import Sampling
    from m6.serving.server import serve as serve_folder

    serve_folder(
        checkpoint,
        host=host,
        port=port,
        max_batch_size=max_batch_size,
        max_waiting=max_waiting,
        deadline_s=deadline,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(guidance, temperature, top_k, top_p),
    )
