"""``m6 downstream``: scores of a fine-tuned run on downstream tasks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from m6.cli.options import check_report
from m6.errors import UserError


def downstream(
    run: Annotated[Path, typer.Argument(help="the folder of a run")],
    out: Annotated[Path | None, typer.Option(help="Markdown to write; default RUN/downstream.md")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="most test rows of each source")] = 200,
) -> None:
    """Scores a fine-tuned run on captions, labels, matches and answers, with baselines on the same rows."""
    for package in ("sacrebleu", "sklearn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f'downstream needs the package {package}: pip install "m6-recipes[downstream]"')
    out = out or run / "downstream.md"
    check_report(out)
    from m6.evaluation.downstream.tasks import write_downstream

    print(write_downstream(run, out, max_rows).read_text(encoding="utf-8"))
