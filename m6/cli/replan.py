"""``m6 plan replan``: called by the job scripts before each attempt at a run with ``m6.elastic``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from m6.cli.options import ConfigFile, Overrides, ProfileFile
from m6.cli.process import quick_imports


def replan(
    config: ConfigFile,
    run: Annotated[Path, typer.Option("--run-dir", help="folder of the run; its slurm/layouts.jsonl gets a line")],
    nodes: Annotated[int, typer.Option(min=1, help="nodes of the job")],
    ranks_per_node: Annotated[int, typer.Option(min=1, help="ranks of a node")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="file for three numbers (nodes, nodes worth a new start, seconds for which these must be idle) and "
            "lines KEY=VALUE"
        ),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="the attempt before failed: without a step, its layout is not used again")
    ] = False,
    init: Annotated[Path | None, typer.Option("--init", help="as in m6 finetune")] = None,
    profile: ProfileFile = None,
    overrides: Overrides = None,
) -> None:
    """Chooses the layout of a run with m6.elastic for the nodes of a job, and records why."""
    from m6.config.run import load_config

    if init is None:
        settings = load_config(config, tuple(overrides or ()))
    else:
        from m6.checkpoints.finetuning import load_finetuning_config

        settings = load_finetuning_config(config, init, tuple(overrides or ()))
    if settings.m6.elastic is None:  # the job scripts only search the text of the JSON for the section's name
        typer.echo(f"{config}: without m6.elastic the layout is that of the JSON")
        return
    from m6.checkpoints.discovery import complete_checkpoints
    from m6.files import write_text
    from m6.runs.layouts import measured_steps, read_layouts, write_layouts

    history = read_layouts(run)
    if failed and history:
        # A layout with finished steps, in either phase, is not blamed for an attempt without any.
        attempts = zip(history, measured_steps(run, history), strict=True)
        history[-1].failed = not any(each.layout == history[-1].layout and s is not None for each, s in attempts)
    with quick_imports():
        from m6.planning.machine.profile import load_profile
        from m6.planning.replan import is_planned_work, node_of, settings_of
        from m6.planning.replan import replan as choose

    rates = None if profile is None else load_profile(profile)
    measured = measured_steps(run, history, is_planned_work(settings))
    decision = choose(settings, node_of(settings, ranks_per_node), nodes, history, measured, rates)
    saved = complete_checkpoints(run / "checkpoints")
    step = int(saved[-1].name.removeprefix("step_")) if saved else 0
    (run / "slurm").mkdir(parents=True, exist_ok=True)
    write_layouts(run, [*history, decision.record(time.time(), step, nodes)])
    if out is not None:
        grow_after_s = settings.m6.elastic.grow_after_s
        grow_at = 0 if grow_after_s is None else decision.grow_at
        lines = (decision.nodes, grow_at, grow_after_s or 0, *settings_of(settings, decision.layout))
        write_text(out, "".join(f"{line}\n" for line in lines))
    typer.echo(f"{decision.nodes} of {nodes} nodes: {decision.layout}: {decision.reason}")
