"""The command line: ``m6 COMMAND``. A user's mistake ends in one line on stderr and exit code 2."""

from __future__ import annotations

import errno
import functools
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from m6.errors import StorageError, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
ConfigFile = Annotated[Path, typer.Argument(help="the run's JSON, for example configs/m6_smoke.json")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer evaluates the annotation on Python 3.10
    typer.Option("--set", help="KEY.PATH=VALUE, overrides a value of the JSON; may be given often"),
]
NewRunFolder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--run-dir", help="folder of the run; default runs/NAME of the JSON; an existing run is resumed"),
]
Restart = Annotated[
    bool,
    typer.Option("--restart", help="begin at step 0; what the folder holds of the run stays, under another name"),
]
RunFolder = Annotated[Path, typer.Argument(help="the folder of a run")]


@app.callback(help="Pretrain M6-style multimodal mixture-of-experts transformers.")
def _launched(local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = 0) -> None:
    """Takes the option that the deepspeed launcher puts before the command; the rank is in the environment."""


@app.command()
def pretrain(
    config: ConfigFile,
    run: NewRunFolder = None,
    overrides: Overrides = None,
    profile: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="what `m6 plan calibrate` wrote, to predict the time of a step"),
    ] = None,
    restart: Restart = False,
) -> None:
    """Pretrains a model, or goes on where the run in the folder stopped.

    The same command runs under torchrun, deepspeed and srun.
    """
    _train(config, overrides, run, profile=profile, restart=restart)


@app.command()
def finetune(
    config: ConfigFile,
    init: Annotated[Path, typer.Option("--init", help="the run or exported model whose weights it begins with")],
    run: NewRunFolder = None,
    overrides: Overrides = None,
    restart: Restart = False,
) -> None:
    """Trains a pretrained model on other objectives, such as text to image.

    It is pretraining in everything else: resuming, launchers, logs, checkpoints. The JSON leaves out the model, which
    is that of --init.
    """
    _train(config, overrides, run, init=init, restart=restart)


def _train(
    config: Path,
    overrides: list[str] | None,
    run: Path | None,
    init: Path | None = None,
    profile: Path | None = None,
    restart: bool = False,
) -> None:
    from m6.runs.evidence import answer_sigquit
    from m6.runs.signals import StopFlag

    stop_flag = StopFlag()
    answer_sigquit()
    from m6.config.checks import check_world_size
    from m6.config.run import load_config
    from m6.model.patch_encoders import check_patch_encoder
    from m6.runs.directory import RunDirectory
    from m6.runs.processes import start, world_size_of_environment
    from m6.runs.trackers import check_trackers

    # Everything that can be wrong is found before anything is written.
    if init is None:
        settings = load_config(config, tuple(overrides or ()))
    else:
        from m6.checkpoints.initial import load_finetuning_config

        settings = load_finetuning_config(config, init, tuple(overrides or ()))
    check_world_size(settings, world_size_of_environment())
    settings.deepspeed.check_device()
    check_trackers(settings.m6.logging)
    check_patch_encoder(settings.model.patch_encoder)
    from m6.planning.machine.profile import load_profile

    calibration = None if profile is None else load_profile(profile)
    folder = RunDirectory(run or Path("runs") / config.stem)
    folder.check(settings)
    from m6.checkpoints.discovery import check_tokenizer_unchanged, complete_checkpoints
    from m6.checkpoints.initial import check_initial_weights
    from m6.runs.data import open_data
    from m6.training.loop import pretrain as pretrain_run

    tokenizer = open_data(settings).tokenizer
    check_tokenizer_unchanged(folder.checkpoints, tokenizer.fingerprint)
    if settings.m6.init is not None and not complete_checkpoints(folder.checkpoints):
        check_initial_weights(settings.m6.init, tokenizer)
    pretrain_run(settings, folder.root, start(), stop_flag, calibration, restart)
    stop_flag.ignore()


@app.command()
def train_image_tokenizer(
    config: Annotated[Path, typer.Argument(help="the JSON, for example configs/image_tokenizer/pictures_64.json")],
    out: Annotated[Path, typer.Option(help="folder of the tokenizer; a run that is there already goes on")],
    overrides: Overrides = None,
) -> None:
    """Trains a VQ autoencoder that turns pictures into codes, and measures it on held-out pictures."""
    from m6.runs.signals import StopFlag

    stop_flag = StopFlag()
    from m6.config.image_tokenizer import load_settings

    settings = load_settings(config, tuple(overrides or ()))
    from m6.runs.processes import default_device
    from m6.training.tokenizers.image import train_image_tokenizer as train

    measures = train(settings, out, default_device(), stopped=lambda: stop_flag.raised)
    stop_flag.ignore()
    if measures is None:
        print(f"stopped; the same command goes on in {out}")
        return
    print(measures.table())
    print(
        f"{measures.codebook_usage:.1%} of {settings.model.codebook_size:,} codes are used, perplexity "
        f"{measures.codebook_perplexity:,.0f}; {out / 'training/reconstructions.png'} shows what came back"
    )


@app.command()
def delink(
    run: RunFolder,
    out: Annotated[Path, typer.Option("--out", help="folder of the Real run; must not exist or be empty")],
) -> None:
    """Makes a Real run of a Pseudo run's newest checkpoint, for m6 pretrain to go on with, on any number of ranks.

    The same command runs under torchrun, deepspeed and srun.
    """
    from m6.checkpoints.delink import delink_run
    from m6.runs.processes import start

    runtime = start()
    written = delink_run(run, out, runtime)
    if runtime.is_main:
        print(written)


@app.command()
def evaluate(
    run: RunFolder,
    batches: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="micro-batches per objective; default: as many as during training"),
    ] = None,
    out: Annotated[Optional[Path], typer.Option(help="Markdown report; default RUN/report.md")] = None,  # noqa: UP045
) -> None:
    """Compares the validation loss of each objective with unigram, bigram and 5-gram models."""
    from m6.evaluation.report import write_report

    print(write_report(run, out or run / "report.md", batches).read_text(encoding="utf-8"))


@app.command()
def export(
    run: RunFolder,
    hf: Annotated[Path, typer.Option("--hf", help="folder to write; must not exist or be empty")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
) -> None:
    """Writes a run's newest checkpoint in Hugging Face's format, for ``from_pretrained``."""
    from m6.export import export_hf

    export_hf(run, hf, dtype=dtype)
    print(hf)


@app.command()
def submit(
    config: ConfigFile,
    job: Annotated[
        Path, typer.Option(help="JSON with the nodes and limits of the job: see configs/jobs, or m6 plan --out")
    ],
    run: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--run-dir", help="folder of the run, which all nodes share; default runs/NAME of the JSON"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command, do nothing")] = False,
    chain: Annotated[int, typer.Option(min=1, help="jobs that follow each other, instead of one that requeues")] = 1,
    array: Annotated[int, typer.Option(min=0, help="the same as one job array of this many tasks")] = 0,
    init: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--init", help="as of m6 finetune, for a run that begins with another's weights"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Submits a run to Slurm, or goes on with one; refuses what cannot work."""
    from m6.slurm import submission

    plan = submission.plan_submission(
        config, tuple(overrides or ()), job, run or Path("runs") / config.stem, chain, array, init
    )
    jobs = [] if dry_run else submission.submit(plan)
    print(shlex.join(plan.command), *jobs, sep="\n")


@app.command()
def status(run: RunFolder) -> None:
    """Shows how a run is doing: jobs, attempts, step, loss, speed, checkpoint, disk."""
    from m6.slurm.status import describe_status

    print(describe_status(run))


@app.command()
def plot(
    run: RunFolder,
    experts: Annotated[bool, typer.Option("--experts", help="the load of every expert over training")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="the device's memory over a step, where experts are offloaded")
    ] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="PNG to write; default RUN/curves.png, RUN/experts.png or RUN/memory.png"),
    ] = None,
) -> None:
    """Draws a run's curves, the load of its experts, or its memory."""
    if experts and memory:
        raise UserError("plot: give either --experts or --memory")
    from m6.plots.experts import plot_experts
    from m6.plots.memory import plot_memory
    from m6.plots.run import plot_run

    draw = plot_experts if experts else plot_memory if memory else plot_run
    print(draw(run, out))


@functools.cache
def _mount_commands() -> None:
    from m6.cli.data import app as data_app
    from m6.cli.data import codes, tokenizer
    from m6.cli.downstream import downstream
    from m6.cli.generate import generate
    from m6.cli.pictures import evaluate_pictures
    from m6.cli.plan import app as plan_app
    from m6.cli.serve import serve

    app.command()(evaluate_pictures)
    app.command()(generate)
    app.command()(serve)
    app.command()(downstream)
    data_app.command()(tokenizer)
    data_app.command()(codes)

    app.add_typer(data_app, name="data", help="Build data sets and tokenizers.")
    app.add_typer(plan_app, name="plan", help="Choose a layout for a run on a cluster: does it fit, how fast is it.")


def main() -> None:
    """Entry point of ``m6`` and ``python -m m6``."""
    _mount_commands()
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        if not isinstance(error, StorageError):
            _tell_job(str(error))
        sys.exit(2)
    except OSError as error:
        # A file or a disk that cannot be used is no defect of the program; other system errors may be one.
        if error.filename is None and error.errno not in _FULL_DISK:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _tell_job(message: str) -> None:
    """Leaves the message to the job that this is an attempt of, for which another one would make the same mistake."""
    attempt = os.environ.get("M6_ATTEMPT_DIR")
    if attempt:
        from m6.files import write_text

        write_text(Path(attempt, "mistake"), message + "\n")


if __name__ == "__main__":
    main()
