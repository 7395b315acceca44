"""``m6 export``, ``m6 delink`` and ``m6 verify``: commands on the checkpoints of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from m6.cli.options import RunFolder, check_run

_SHOWN = 20  # differences of two checkpoints


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
    if name is None:
        check_run(run)
    from m6.export import check_push, export_hf, push

    if name is not None:
        check_push(name)  # before an export that may take long
    export_hf(run, hf, dtype=dtype, licence=licence)
    print(hf)
    if name is not None:
        print(push(hf, name))


def delink(
    run: RunFolder,
    out: Annotated[Path, typer.Option("--out", help="folder of the Real run; must not exist or be empty")],
) -> None:
    """Makes a Real run from a Pseudo run's newest checkpoint; m6 pretrain continues it on any number of ranks.

    The same command runs under torchrun, deepspeed and srun.
    """
    check_run(run)
    from m6.checkpoints.delink import delink_run
    from m6.runs.processes import start

    runtime = start()
    written = delink_run(run, out, runtime)
    if runtime.is_main:
        print(written)


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
    check_run(first)
    check_run(second)
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
