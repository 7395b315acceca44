"""Scores of a model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from m6.errors import UserError, nearest
from m6.evaluation.harness.adapter import M6LM
from m6.files import write_json
from m6.formatting import markdown_table

OWN_TASKS = ("m6_news", "m6_reviews")
_FOLDER = Path(__file__).parent / "tasks"


def write_scores(
    folder: Path, data: Path | None, tasks: Sequence[str], out: Path, batch_size: int, max_rows: int | None
) -> str:
    """Scores a model and writes the scores as JSON.

    Args:
        folder: folder of a run, or a folder written by ``m6 export``.
        data: the data folder of ``OWN_TASKS``.
        tasks: names of ``OWN_TASKS`` or of the harness's own tasks (with data from the Hub).
        out: the JSON file.
        batch_size: rows of a forward pass.
        max_rows: most rows of each task; None: all.

    Returns:
        A table in Markdown.

    Raises:
        UserError: a task is unknown, its data is missing, or the folder holds no model.
    """
    own = [name for name in tasks if name in OWN_TASKS]
    if own and data is None:
        raise UserError(f'{own[0]} needs --data, a folder made by "m6 data build reviews inews"')
    for name in tasks:  # checked first: reading the harness's hundreds of tasks takes long
        if name.startswith("m6_") and name not in OWN_TASKS:
            raise UserError(f"{name}: no such task{nearest(name, OWN_TASKS)}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(
        include_path=str(_FOLDER), include_defaults=len(own) < len(tasks), metadata={"data": str(data)}
    )
    for name in tasks:
        if name not in manager.all_tasks:
            raise UserError(f"{name}: no such task{nearest(name, manager.all_tasks)}")
    model = M6LM(folder, batch_size)
    try:
        results = lm_eval.simple_evaluate(
            model=model, tasks=list(tasks), task_manager=manager, limit=max_rows, log_samples=False
        )
    except OSError as error:  # no network, no such data set, or no account for it
        raise UserError(f"{', '.join(tasks)}: the data cannot be read: {' '.join(str(error).split())}") from None
    assert results is not None, "only other ranks get none"
    document = {
        "model": str(folder),
        "tokenizer": model.tokenizer_name,
        "lm_eval": lm_eval.__version__,
        "versions": results["versions"],
        "rows": {name: number["effective"] for name, number in results["n-samples"].items()},
        "scores": {name: dict(_scores(values)) for name, values in results["results"].items()},
    }
    write_json(out, document)
    cells = [
        [task, f"{document['rows'].get(task, 0):,}", metric, f"{value:.4f}"]
        for task, scores in document["scores"].items()
        for metric, value in scores.items()
    ]
    return markdown_table(["task", "rows", "metric", "value"], cells, "lrlr")


def _scores(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of one task, such as ``acc`` and ``acc_stderr``; the harness calls them ``acc,none`` and so on."""
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if comma and isinstance(value, int | float):
            yield metric if filtered == "none" else key, float(value)
