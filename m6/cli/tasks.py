"""``m6 evaluate-tasks``: scores on tasks of lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from m6.cli.options import check_file
from m6.errors import UserError


def evaluate_tasks(
    run: Annotated[Path, typer.Argument(help="the folder of a run, or of an exported model")],
    data: Annotated[
        Path | None,
        typer.Option(help='the data folder of m6_reviews and m6_news, made by "m6 data build reviews inews"'),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="m6_reviews, m6_news, or a task of lm_eval; can be repeated; default: the first two"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="rows of a forward pass")] = 16,
    max_rows: Annotated[int | None, typer.Option(min=1, help="most rows of each task; default: all")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON with the scores; default RUN/tasks.json")] = None,
) -> None:
    """Scores a model on tasks of lm-evaluation-harness: likelihoods of answers, perplexity, generated texts."""
    check_file(out or run / "tasks.json", "the JSON file")
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError('evaluate-tasks needs the package lm_eval: pip install "m6-recipes[harness]"')
    from m6.evaluation.harness.scores import OWN_TASKS, write_scores

    print(write_scores(run, data, task or OWN_TASKS, out or run / "tasks.json", batch_size, max_rows))
