"""``m6 downstream``: tables of a fine-tuned run's scores on the test split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from m6.checkpoints.loading import load_run_model
from m6.config.run import load_config
from m6.data.manifest import Manifest
from m6.data.objectives import source_kind
from m6.data.weights import source_weights
from m6.errors import UserError
from m6.evaluation.downstream.held_out import held_out
from m6.evaluation.downstream.tasks import TASKS, Scores, Subject
from m6.evaluation.held_out import describe_other_training
from m6.files import write_json, write_text
from m6.formatting import markdown_table
from m6.runs.processes import default_device


def write_downstream(run_dir: Path, out: Path, max_rows: int) -> Path:
    """Evaluates every downstream task that a run was trained on; writes tables, and the same as JSON beside them.

    Test rows that training holds are left out, and counted below the table, as are those beyond ``max_rows``.

    Args:
        run_dir: a run with a complete checkpoint; its data folder must still exist.
        out: the Markdown file to write.
        max_rows: maximum number of test rows of each source.

    Returns:
        ``out``.

    Raises:
        UserError: the folder is not a run, its data are missing or have no test rows, or none of its objectives is a
            downstream task.
    """
    config = load_config(run_dir / "config.json")
    tasks = [name for name in TASKS if config.m6.objectives.of(name).weight > 0]
    if not tasks:
        raise UserError(f"{run_dir}: none of its objectives is a downstream task; those are {', '.join(TASKS)}")
    model, processor = load_run_model(run_dir, default_device())
    manifest = Manifest.load(config.m6.data.path)
    subject = Subject(model, processor, config, manifest, max_rows)
    parts = [f"# Downstream tasks of {run_dir.absolute().name}"]
    records: list[dict[str, Any]] = []
    for name in tasks:
        for source in source_weights(manifest, "train", config.m6.data.sources):
            if manifest.sources[source].kind == source_kind(name) and manifest.split(source, "test").rows:
                training, read = subject.rows(source, "train"), subject.rows(source)
                tested = held_out(read, training)
                scores = TASKS[name].score(subject, source, tested.rows, training)
                parts.append(f"## {TASKS[name].title.format(f'{source}, {len(tested.rows):,}')}")
                rows = manifest.split(source, "test").rows
                limited = f"Read were {len(read):,} of {rows:,} test rows (--max-rows)." if len(read) < rows else ""
                parts += filter(None, [_table(scores), limited, tested.remark])
                counts = {"rows": len(tested.rows), "rows_read": len(read), "test_rows": rows}
                records.append({"task": name, "source": source, **counts, "scores": _plain(scores)})
    if not records:
        raise UserError(
            f'{manifest.folder}: split "test" has no rows of the sources that {", ".join(tasks)} read; build the data '
            "with a larger --test-share"
        )
    parts += filter(None, [describe_other_training(run_dir, manifest, [record["source"] for record in records])])
    parts.append("In brackets: 95 % confidence intervals over the test rows.")
    write_json(out.with_suffix(".json"), records)
    write_text(out, "\n\n".join(parts) + "\n")
    return out


def _table(scores: Scores) -> str:
    metrics = list(dict.fromkeys(metric for own in scores.values() for metric in own))
    lines = [[name, *(str(own.get(metric, "")) for metric in metrics)] for name, own in scores.items()]
    return markdown_table(["", *metrics], lines)


def _plain(scores: Scores) -> dict[str, Any]:
    return {system: {metric: vars(e) for metric, e in own.items()} for system, own in scores.items()}
