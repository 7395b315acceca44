"""The command line ``m6 COMMAND``. A user's mistake gives one line on stderr and exit code 2.

Commands import heavy modules in their bodies: torch and DeepSpeed take seconds to import, and ``m6 --help`` needs
neither.
"""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import m6
from m6.cli.options import ConfigFile, NewRunFolder, Overrides, ProfileFile, Restart, RunFolder, check_file, check_run
from m6.cli.process import (
    check_address_space,
    is_full_disk,
    is_out_of_memory,
    keep_bars_out_of_logs,
    print_any_name,
    quick_imports,
    report_to_job,
)
from m6.errors import RetryableError, UserError
from m6.runs.signals import StopFlag, answer_sigquit, end_with_launcher

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"m6-recipes {m6.__version__}")
        raise typer.Exit


@app.callback(help="Pretrain M6-style multimodal mixture-of-experts transformers.")
def _launched(
    local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The start of every command, with the options before its name.

    The deepspeed launcher passes --local_rank; ranks come from the environment.
    """
    end_with_launcher()


@app.command()
def pretrain(
    config: ConfigFile,
    run: NewRunFolder = None,
    overrides: Overrides = None,
    profile: ProfileFile = None,
    restart: Restart = False,
) -> None:
    """Pretrains a model, or resumes the run in the folder.

    The same command runs under torchrun, deepspeed and srun.
    """
    _train(config, overrides, run, profile=profile, restart=restart)


@app.command()
def finetune(
    config: ConfigFile,
    init: Annotated[Path, typer.Option("--init", help="the run or exported model that gives the initial weights")],
    run: NewRunFolder = None,
    overrides: Overrides = None,
    restart: Restart = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="begin with random weights, to see what pretraining gains")
    ] = False,
) -> None:
    """Trains a pretrained model on other objectives, such as text to image.

    Resuming, launchers, logs and checkpoints work as in pretraining. The JSON has no model section; the model is that
    of --init.
    """
    _train(config, overrides, run, init=init, restart=restart, from_scratch=from_scratch)


def _train(
    config: Path,
    overrides: list[str] | None,
    run: Path | None,
    init: Path | None = None,
    profile: Path | None = None,
    restart: bool = False,
    from_scratch: bool = False,
) -> None:
    # Before the slow imports below, to catch signals during them.
    stop_flag = StopFlag()
    answer_sigquit()
    from m6.config.checks import check_has_model, check_processes, check_world_size
    from m6.config.run import load_config
    from m6.data.manifest import Manifest
    from m6.planning.machine.profile import load_profile
    from m6.runs.directory import RunDirectory
    from m6.runs.environment import (
        cores_per_rank,
        is_main_of_environment,
        ranks_per_node,
        world_size_of_environment,
    )

    # All checks come before the first write, and checks without torch come before its import.
    folder = RunDirectory(run or Path("runs") / config.stem)
    if init is None:
        settings = load_config(config, tuple(overrides or ()))
        if restart or not (folder.root / "config.json").exists():
            check_has_model(settings, config)
    else:
        from m6.checkpoints.finetuning import load_finetuning_config

        settings = load_finetuning_config(config, init, tuple(overrides or ()), from_scratch=from_scratch)
    world_size = world_size_of_environment()
    check_world_size(settings, world_size)
    check_processes(settings, cores_per_rank())
    folder.check(settings)
    Manifest.load(settings.m6.data.path)
    calibration = None if profile is None else load_profile(profile)
    with quick_imports():
        from m6.planning.prediction import RunForecast, check_memory
        from m6.runs.machine import check_machine
        from m6.runs.processes import on_main_rank, start
        from m6.training.loop import pretrain as pretrain_run

    check_machine(settings)
    check_memory(settings, world_size, ranks_per_node(world_size))
    from m6.checkpoints.initial import check_start, warn_at_start
    from m6.runs.data import open_data
    from m6.training.stages.stage import finished_pseudo_stage

    data = open_data(settings)
    check_start(settings, folder, data, restart)
    if restart or finished_pseudo_stage(settings, folder.checkpoints) is None:
        runtime = start()
        on_main_rank(functools.partial(warn_at_start, settings, data, runtime.nodes))
        del data  # the training opens it again
        forecast = RunForecast(folder.root, settings, world_size, calibration)
        pretrain_run(settings, folder.root, runtime, stop_flag, forecast, restart)
    # The run is saved. A stop signal from now on would only turn success into a failure.
    stop_flag.ignore()
    step = finished_pseudo_stage(settings, folder.checkpoints)
    if step is not None and is_main_of_environment():
        message = f"the Pseudo stage of {folder.root} is over at step {step}: the JSON of the Real stage goes on"
        print(message, file=sys.stderr)
        report_to_job(message, "over")


@app.command()
def train_image_tokenizer(
    config: Annotated[Path, typer.Argument(help="the JSON, or the name of a shipped one, for example pictures_64")],
    out: Annotated[Path, typer.Option(help="folder of the tokenizer; an interrupted training there is resumed")],
    overrides: Overrides = None,
) -> None:
    """Trains a VQ autoencoder that encodes pictures, and measures it on held-out pictures."""
    stop_flag = StopFlag()
    from m6.config.image_tokenizer import load_settings
    from m6.data.workers import check_number, usable_cores

    settings = load_settings(config, tuple(overrides or ()))
    check_number("data.num_workers", settings.data.num_workers, usable_cores())
    from m6.runs.processes import default_device, keep_freed_memory
    from m6.training.tokenizers.image import train_image_tokenizer as train

    device = default_device()
    keep_freed_memory(device)
    measures = train(settings, out, device, stopped=lambda: stop_flag.raised)
    stop_flag.ignore()
    if measures is None:
        print(f"stopped; the same command resumes the training in {out}")
        return
    print(measures.table())
    print(
        f"{measures.codebook_usage:.1%} of {settings.model.vocab_size:,} codes are used, perplexity "
        f"{measures.codebook_perplexity:,.0f}; {out / 'training/reconstructions.png'} shows reconstructions"
    )


@app.command()
def evaluate(
    run: RunFolder,
    rows: Annotated[
        int | None, typer.Option(min=1, help="rows per objective; default: as many as during training")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help='a data folder, made by "m6 data build"; default: the one the run learned from')
    ] = None,
    split: Annotated[str | None, typer.Option(help="train, validation or test; default: validation")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Markdown report; default RUN/report.md, or RUN/report_DATA_SPLIT.md")
    ] = None,
) -> None:
    """Compares the loss of each objective on held-out data with unigram, bigram and 5-gram models."""
    if out is not None:
        check_file(out, "the Markdown file")
    check_run(run)
    from m6.evaluation.report import report_file, write_report

    out = out or report_file(run, data, split)
    check_file(out, "the Markdown file")
    written = write_report(run, out, rows, data, split)
    print(written.read_text(encoding="utf-8"))


@app.command()
def submit(
    config: ConfigFile,
    job: Annotated[
        Path,
        typer.Option(
            help="JSON with the nodes and limits of the job, which m6 plan --out writes, or the name of a shipped one, "
            "for example gpu_1x8"
        ),
    ],
    run: Annotated[
        Path | None,
        typer.Option("--run-dir", help="folder of the run, which all nodes share; default runs/NAME of the JSON"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything and print the command only")] = False,
    chain: Annotated[int, typer.Option(min=1, help="number of consecutive jobs, instead of one that requeues")] = 1,
    array: Annotated[int, typer.Option(min=0, help="like --chain, as one job array with this many tasks")] = 0,
    restart: Restart = False,
    init: Annotated[
        Path | None,
        typer.Option("--init", help="as in m6 finetune: the run or exported model that gives the initial weights"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Submits a new or existing run to Slurm, after checking that it can work."""
    from m6.slurm import submission

    plan = submission.plan_submission(
        config, tuple(overrides or ()), job, run or Path("runs") / config.stem, chain, array, init, restart
    )
    if plan.config.m6.elastic is not None:
        from m6.planning.replan import check_bounds

        check_bounds(plan.config, plan.ranks_per_node)
    jobs = [] if dry_run else submission.submit(plan)
    print(shlex.join(plan.command), *jobs, sep="\n")


@app.command()
def status(run: RunFolder) -> None:
    """Shows the status of a run: jobs, attempts, step, loss, speed, checkpoint, disk."""
    check_run(run)
    from m6.slurm.status import describe_status

    print(describe_status(run))


@app.command()
def plot(
    run: RunFolder,
    experts: Annotated[bool, typer.Option("--experts", help="the load of every expert over training")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="device memory over a step of a run with offloaded experts")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="PNG to write; default RUN/curves.png, RUN/experts.png or RUN/memory.png"),
    ] = None,
) -> None:
    """Plots a run's curves, the load of its experts, or its device memory."""
    if experts and memory:
        raise UserError("plot: give either --experts or --memory")
    if out is not None:
        check_file(out, "the PNG")
    check_run(run)
    if experts:
        from m6.plots.experts import plot_experts as draw
    elif memory:  # needs the model; its import takes seconds
        from m6.plots.plans import plot_memory as draw
    else:
        from m6.plots.run import plot_run as draw
    print(draw(run, out))


@functools.cache
def _mount_commands() -> None:
    """Adds the commands of the other modules, once per process."""
    from m6.cli.checkpoints import delink, export, verify
    from m6.cli.data import app as data_app
    from m6.cli.inference import classify, generate, serve
    from m6.cli.plan import app as plan_app
    from m6.cli.scores import downstream, evaluate_pictures, evaluate_tasks

    for command in (delink, export, evaluate_pictures, evaluate_tasks, generate, classify, serve, downstream, verify):
        app.command()(command)
    app.add_typer(data_app, name="data", help="Build data sets and tokenizers.")
    app.add_typer(plan_app, name="plan", help="Choose a layout for a run on a cluster; predict memory and step time.")


def _is_of_this_module(command: str) -> bool:
    names = (each.callback.__name__ for each in app.registered_commands if each.callback is not None)
    return command in (name.replace("_", "-") for name in names)


def main() -> None:
    """Entry point of ``m6`` and ``python -m m6``."""
    try:
        keep_bars_out_of_logs()
        print_any_name()
        check_address_space()
        # A training does not import the other commands.
        if not _is_of_this_module("".join(sys.argv[1:2])):
            _mount_commands()
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        if not isinstance(error, RetryableError):
            report_to_job(str(error))
        sys.exit(2)
    except OSError as error:
        # An unusable file or a full disk is not a defect of the program. Other system errors may be: show a traceback.
        if error.filename is None and not is_full_disk(error):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError, ImportError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"error: out of memory: {' '.join(str(error).split()) or 'an allocation failed'}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
