"""``m6 data corpus`` and ``m6 data report``: a corpus from a recipe, and the page about it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from m6.cli.options import Overrides

if TYPE_CHECKING:
    from m6.evaluation.caption_matcher import CaptionMatcher


def corpus(
    recipe: Annotated[Path, typer.Argument(help="JSON of the corpus, or the name of a shipped recipe.")],
    executor: Annotated[
        Literal["local", "slurm"], typer.Option(help="local: processes of this machine; slurm: arrays of jobs.")
    ] = "local",
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of a stage. The result does not depend on it.")] = 1,
    overrides: Overrides = None,
) -> None:
    """Makes a data folder from large inputs: cleans, filters, removes copies and what is held out."""
    from m6.corpus.launch import make_corpus
    from m6.corpus.output import load_record
    from m6.corpus.recipe import load_recipe

    settings = load_recipe(recipe, tuple(overrides or ()))
    launched = make_corpus(settings, executor, tasks, open_scorer)
    if launched.jobs:
        for stage, job in launched.jobs.items():
            typer.echo(f"{stage}: job {job}")
        typer.echo(f"{launched.out} is complete when they have ended; the same command continues after a failure")
        return
    typer.echo(f"{launched.out} {'holds this corpus already' if launched.was_built else 'is built'}")
    record = load_record(launched.out)
    for name, tally in record.inputs.items():
        removed = ", ".join(f"{stage} {sum(reasons.values()):,}" for stage, reasons in tally.removed.items())
        typer.echo(
            f"  {name}: {tally.documents:,} documents read, {tally.kept:,} kept in {tally.rows:,} rows; "
            f"removed: {removed or 'none'}"
        )
    for name, tally in record.sets.items():
        typer.echo(f"  the set {name}: {tally.kept:,} of {tally.documents:,} texts compared with training documents")


def open_scorer(run: Path) -> "CaptionMatcher":
    """Opens a recipe's ``matching_model``. The tasks of the corpus receive this function as an argument."""
    from m6.evaluation.caption_matcher import CaptionMatcher  # imports torch; most recipes do not need it

    return CaptionMatcher(run)


def report(
    data: Annotated[Path, typer.Argument(help='A data folder, made by "m6 data corpus".')],
    out: Annotated[Path | None, typer.Option(help="Folder of the page; default DATA/report.")] = None,
) -> None:
    """Writes a page about a corpus: what was read, removed and kept, with histograms and examples."""
    from m6.plots.corpus import write_corpus_page

    typer.echo(write_corpus_page(data, out or data / "report"))
