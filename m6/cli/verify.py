"""``m6 verify``: compares the states of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_SHOWN = 20


def verify(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="the folder of a run")],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="the folder of the run to compare it with")],
    step: Annotated[
        int | None, typer.Option(min=0, help="step of the checkpoints; default: the newest that both runs have")
    ] = None,
) -> None:
    """Compares checkpoints of two runs to the bit: weights, optimizer state and counters, whatever their layouts.

    Exit code 0: equal; 1: different.
    """
    from m6.checkpoints.comparison import compare, open_step

    readers = open_step((first, second), step)
    found = compare(*readers)
    for reader, digest in zip(readers, found.digests, strict=True):
        print(f"{digest}  {reader.folder}")
    if not found.differences:
        print(f"equal: {found.num_tensors:,} tensors and the training state")
        return
    print(
        f"different in {len(found.differences):,} places, in the order of the model:",
        *found.differences[:_SHOWN],
        sep="\n",
    )
    if len(found.differences) > _SHOWN:
        print(f"and {len(found.differences) - _SHOWN:,} more")
    raise typer.Exit(1)
