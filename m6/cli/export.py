"""``m6 export``: a run's newest checkpoint for Hugging Face's libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m6.cli.options import RunFolder


def export(
    run: RunFolder,
    hf: Annotated[Path, typer.Option("--hf", help="folder to write; must not exist or be empty")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    licence: Annotated[
        str | None, typer.Option(help="of the weights, for the model card, as the Hub names it: cc-by-sa-4.0")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--push", help="upload it to the Hub under this name; a new repository is private"),
    ] = None,
) -> None:
    """Writes a run's newest checkpoint in Hugging Face's format, with a model card, for ``from_pretrained``."""
    from m6.export import check_push, export_hf, push

    if name is not None:
        check_push(name)  # before an export that may take long
    export_hf(run, hf, dtype=dtype, licence=licence)
    print(hf)
    if name is not None:
        print(push(hf, name))
