"""``m6 evaluate-pictures``, ``m6 evaluate-tasks`` and ``m6 downstream``: scores of what a model generates."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from m6.cli.options import RunFolder, check_file, check_model, check_report, check_run
from m6.errors import UserError


def evaluate_pictures(
    generated: Annotated[Path, typer.Argument(help="folder of PNG files with captions.jsonl, from generate --out-dir")],
    data: Annotated[Path, typer.Option(help='the data folder with real pictures, made by "m6 data build"')],
    source: Annotated[
        list[str] | None,
        typer.Option(help="a source of real pictures; can be repeated; default: all with pictures and captions"),
    ] = None,
    held_out_style: Annotated[
        str | None,
        typer.Option(help="drawing style that the judge is not trained on: the last part of the ids, such as twemoji"),
    ] = None,
    among: Annotated[
        Path | None,
        typer.Option(help="the captions that the judge tells apart: a text file with one per line; default: all"),
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(help="folder of the judge; an existing judge is used, a new one is saved there"),
    ] = None,
    judge_steps: Annotated[int, typer.Option(min=1, help="training steps of the judge, 32 pictures each")] = 1500,
    inception: Annotated[
        Path | None,
        typer.Option(help="weights of Inception-v3 in torch-fidelity's format: also FID and KID on its features"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Markdown report; the same name with .json gets the numbers; default GENERATED/report.md"),
    ] = None,
) -> None:
    """Evaluates generated pictures: accuracy of a classifier trained on real ones, FID and KID, search for copies."""
    out = out or generated / "report.md"
    check_report(out)
    from m6.cli.inference import read_captions
    from m6.data.manifest import Manifest
    from m6.evaluation.pictures.captioned import load_generated, load_real
    from m6.evaluation.pictures.comparison import open_inception
    from m6.evaluation.pictures.judge import JudgeSettings, load_or_train_judge
    from m6.evaluation.pictures.report import evaluate_pictures as compare
    from m6.evaluation.pictures.report import judged_part, markdown
    from m6.files import write_json, write_text
    from m6.runs.processes import default_device

    settings = JudgeSettings(total_steps=judge_steps)
    pictures, skipped = load_generated(generated, settings.image_size)
    real = load_real(
        Manifest.load(data),
        source,
        held_out_style,
        settings.image_size,
        None if among is None else set(read_captions(among)),
    )
    judged_part(pictures, real.judged.captions)  # checks its arguments, before the slow training of a judge
    inception_network = None if inception is None else open_inception(inception)
    device = default_device()
    network = load_or_train_judge(real.judged, settings, judge, device)
    report = compare(pictures, skipped, real, network, device, inception_network)
    write_json(out.with_suffix(".json"), report.document())
    write_text(out, markdown(report))
    print(markdown(report), end="")


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
    check_model(run)
    from m6.evaluation.harness.adapter import OWN_TASKS, write_scores

    print(write_scores(run, data, task or OWN_TASKS, out or run / "tasks.json", batch_size, max_rows))


def downstream(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="Markdown to write; default RUN/downstream.md")] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="most test rows of each source")] = 200,
) -> None:
    """Scores a fine-tuned run on captions, labels, matches and answers, with baselines on the same rows."""
    for package in ("sacrebleu", "sklearn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f'downstream needs the package {package}: pip install "m6-recipes[downstream]"')
    out = out or run / "downstream.md"
    check_report(out)
    check_run(run)
    from m6.evaluation.downstream import write_downstream

    print(write_downstream(run, out, max_rows).read_text(encoding="utf-8"))
