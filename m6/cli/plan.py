"""``m6 plan``: commands of the planner."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from m6.cli.options import ConfigFile, ConfigFiles, Overrides, ProfileFile
from m6.cli.process import quick_imports

if TYPE_CHECKING:
    from m6.planning.machine.cluster import Cluster
    from m6.planning.search.planner import Planner

_DEFAULT = "best"


class _PlanGroup(TyperGroup):
    """A command group with a default: ``m6 plan CONFIG`` runs ``m6 plan best CONFIG``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Inserts the default command if the first argument is not a command."""
        if args and args[0] not in self.commands:
            args = [_DEFAULT, *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(no_args_is_help=True, cls=_PlanGroup)

ClusterFile = Annotated[
    Path, typer.Option("--cluster", help="a cluster's JSON, or the name of a shipped one, for example h100_x128")
]
Forced = Annotated[
    list[str] | None, typer.Option("--force", help="NAME=VALUE that the layout must have, such as zero_stage=2")
]
Stage = Annotated[
    Literal["pseudo", "real"], typer.Option(help="pseudo: the first stage of m6.pseudo_to_real, with shared weights")
]
World = Annotated[
    int | None, typer.Option("--world", min=1, help="devices: a part of the cluster, or more of its nodes")
]
Fraction = Annotated[float, typer.Option("--memory-fraction", min=0.01, max=1.0, help="share of memory to plan for")]
MEMORY_FRACTION = 0.9


@app.command(name=_DEFAULT)
def best(
    config: ConfigFile,
    cluster: ClusterFile,
    overrides: Overrides = None,
    force: Forced = None,
    profile: ProfileFile = None,
    world: World = None,
    memory_fraction: Fraction = MEMORY_FRACTION,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for the run's JSON with the plan, the job's JSON and a script for sbatch"),
    ] = None,
    time_limit_min: Annotated[int, typer.Option(min=1, help="time limit of the job in minutes")] = 1440,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON: days, GPU-days, memory, layouts")] = False,
) -> None:
    """Finds the fastest layout that the engine runs and that fits, and says why the others are not better.

    A Pseudo-to-Real run is planned for both stages.
    """
    from m6.errors import UserError

    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; expected the folder to write to")
    planner = _planner(config, cluster, overrides, force, profile, memory_fraction)(world)
    from m6.planning.booking import book_stage, booking, booking_table
    from m6.planning.reports import run_report
    from m6.planning.search.job_files import job_files
    from m6.planning.search.stages import plan_run

    found = plan_run(planner)
    stages, results = found.stages, found.results
    if not as_json:
        print("\n\n".join(run_report(found)), end="\n\n")
    if not all(result.plans for result in results):
        missing = "" if len(stages) == 1 else f" for the {'Real' if results[0].plans else 'Pseudo'} stage"
        raise UserError(f"{config}: no layout fits on {planner.cluster.name}{missing}")
    plans = [result.best for result in results]
    booked = [book_stage(stage, plan, time_limit_min) for stage, plan in zip(stages, plans, strict=True)]
    print(json.dumps(booking(booked, stages[-1])) if as_json else booking_table(booked, stages[-1], time_limit_min))
    if out is not None:
        said = sys.stderr if as_json else sys.stdout
        jobs = job_files(stages, plans, config.stem, time_limit_min)
        for job in jobs:
            job.write(out)
            print(f"\nwrote {out / job.name}.json, .job.json and .sbatch", end="", file=said)
        next_step = "to submit it:" if len(jobs) == 1 else "to submit both, of which the second waits for the first:"
        print(f"; {next_step}", file=said)
        for job in jobs:
            print(f"m6 submit {out / job.name}.json --job {out / job.name}.job.json --run-dir RUN", file=said)


@app.command()
def explain(
    config: ConfigFile,
    cluster: ClusterFile,
    overrides: Overrides = None,
    force: Forced = None,
    profile: ProfileFile = None,
    stage: Stage = "real",
    world: World = None,
    memory_fraction: Fraction = MEMORY_FRACTION,
) -> None:
    """Shows memory and time of one layout in detail: that of the JSON, changed by --force.

    Also lists what the engine supports for the optimizer and precision.
    """
    from dataclasses import replace

    planner = _planner(config, cluster, overrides, None, profile, memory_fraction, stage)(world)
    from m6.planning.cost.layout import layout_of
    from m6.planning.reports import explanation
    from m6.planning.search.configuration import parse_forced
    from m6.planning.search.feasibility import capability_matrix

    layout = layout_of(planner.config, planner.cluster.num_devices)
    layout = replace(layout, **parse_forced(tuple(force or ())))
    print(explanation(planner, planner.evaluate(layout)))
    print(f"\nWhat the engine supports for this optimizer and precision:\n\n{capability_matrix(planner.config)}")


@app.command()
def frontier(
    configs: ConfigFiles,
    cluster: ClusterFile,
    overrides: Overrides = None,
    force: Forced = None,
    profile: ProfileFile = None,
    stage: Stage = "real",
    memory_fraction: Fraction = MEMORY_FRACTION,
    days: Annotated[
        float | None, typer.Option(min=0.01, help="show the loss predicted within so many days of the cluster")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="PNG to draw: step time over memory, or with --days loss over time")
    ] = None,
) -> None:
    """Lists the Pareto-optimal layouts in step time, device memory, host memory and number of devices.

    With --days it shows what each number of devices learns, by its fastest layout. With several configurations
    and --days it shows which one ends lowest for a number of GPU-days.
    """
    from m6.errors import UserError

    makes = {
        config.stem: _planner(config, cluster, overrides, force, profile, memory_fraction, stage) for config in configs
    }
    if len(makes) < len(configs):
        raise UserError(f"{', '.join(map(str, configs))}: expected configurations with different names")
    if len(makes) > 1:
        _compare_recipes(makes, days, out)
        return
    (make,) = makes.values()
    from m6.planning.loss import days_table, learned_by_days, loss_line, predicted_loss
    from m6.planning.reports import layout_table
    from m6.planning.search.planner import device_counts
    from m6.planning.search.planner import frontier as find
    from m6.plots.plans import draw_frontier, draw_losses

    planner = make(None)
    plans = find(lambda part: make(part.num_devices), planner.cluster, device_counts(planner.cluster))
    if days is None:
        print(layout_table(planner, plans))
        if out is not None:
            print(draw_frontier(plans, out))
        return
    fastest: dict[int, float] = {}
    for plan in plans:
        seconds, devices = plan.time.total, plan.layout.world_size
        fastest[devices] = min(seconds, fastest.get(devices, seconds))
    curves = learned_by_days(planner.config, dict(sorted(fastest.items())), days)
    print(days_table(curves, days))
    steps = days * 86400 / min(fastest.values())
    print(f"\nAfter {days:g} days on the fastest: {loss_line(predicted_loss(planner.config, steps), planner.config)}")
    if out is not None:
        print(draw_losses({f"{devices} devices": points for devices, points in curves.items()}, out))


def _compare_recipes(makes: dict[str, Callable[[int | None], Planner]], days: float | None, out: Path | None) -> None:
    """Prints and draws the losses of several configurations for numbers of GPU-days, with the lowest one."""
    from m6.errors import UserError
    from m6.planning.recipes import PricedRecipe, budgets, recipes_report
    from m6.planning.search.planner import curve, device_counts
    from m6.plots.plans import draw_losses

    if days is None:
        raise UserError(f"{', '.join(makes)}: several configurations are compared by what they learn; add --days")
    recipes = []
    for name, make in makes.items():
        planner = make(None)
        priced = curve(
            lambda part, make=make: make(part.num_devices),  # type: ignore[misc]
            planner.cluster,
            device_counts(planner.cluster),
        )
        step_s = {devices: plan.time.total for devices, plan, _ in priced if plan is not None}
        recipes.append(PricedRecipe(name, planner.config, step_s, "" if step_s else priced[-1][2]))
    if not any(recipe.step_s for recipe in recipes):
        raise UserError(f"no configuration fits on {planner.cluster.name}; {recipes[0].name}: {recipes[0].reason}")
    asked = budgets(planner.cluster.num_devices, days)
    print(recipes_report(recipes, asked))
    if out is not None:
        curves = {
            recipe.name: [(budget.gpu_days, loss.loss) for budget in asked if (loss := recipe.after(budget))]
            for recipe in recipes
        }
        print(draw_losses({name: points for name, points in curves.items() if points}, out, "GPU-days"))


@app.command()
def curve(
    config: ConfigFile,
    cluster: ClusterFile,
    overrides: Overrides = None,
    force: Forced = None,
    profile: ProfileFile = None,
    stage: Stage = "real",
    memory_fraction: Fraction = MEMORY_FRACTION,
) -> None:
    """Shows the best layout and its speed on 1, 2, 4, ... devices of the cluster."""
    make = _planner(config, cluster, overrides, force, profile, memory_fraction, stage)
    from m6.planning.reports import curve_table
    from m6.planning.search.planner import curve as find
    from m6.planning.search.planner import device_counts

    whole = make(None).cluster
    print(curve_table(find(lambda part: make(part.num_devices), whole, device_counts(whole))))


@app.command(name="dry-run")
def dry_run(
    config: ConfigFile,
    world: Annotated[int, typer.Option(min=1, help="ranks of the job")],
    rank: Annotated[int, typer.Option(min=0, help="the rank to simulate")] = 0,
    cluster: Annotated[
        Path | None, typer.Option(help="cluster whose node size decides which ranks share a node; default: all do")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Simulates one rank of a large job for one step: the real code on tensors without data.

    With m6.offload it traces a step of each stage and says what the plan keeps on the device, and what moves.
    """
    from m6.config.checks import check_has_model
    from m6.config.run import load_config
    from m6.planning.machine.cluster import load_cluster

    settings = load_config(config, tuple(overrides or ()))
    check_has_model(settings, config)
    nodes = None if cluster is None else load_cluster(cluster).first(world).nodes[0]
    if settings.expert_store is not None:
        from m6.planning import dry_plan

        print(dry_plan.report(dry_plan.dry_plans(settings, world, rank, nodes), world, rank))
        return
    from m6.planning.dry_run import dry_run as run
    from m6.planning.dry_run import report

    print(report(run(settings, world, rank), world, rank, nodes))


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="the profile to write; an existing one is updated by the new measurements")],
    disk: Annotated[
        Path | None, typer.Option(help="folder of checkpoints, to measure how fast all ranks write together")
    ] = None,
) -> None:
    """Measures this machine: matrix products, memory and optimizer; under a launcher, also links between ranks."""
    import torch

    import m6.training.loop  # noqa: F401 - the measured memory includes the modules of a run
    from m6.planning.machine.calibration import calibrate as measure
    from m6.planning.machine.profile import load_profile, save_profile
    from m6.runs.processes import start
    from m6.training.engine.optimizer import Adafactor

    def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True)

    runtime = start()
    previous = load_profile(out) if out.exists() else None
    profile = measure(runtime.device, {"AdamW": adamw, "Adafactor": Adafactor}, previous, disk, runtime.nodes)
    if runtime.is_main:
        save_profile(profile, out)
        print(f"{out}: {profile.source}; {len(profile.matmul)} products, {len(profile.collectives)} collectives")
        if previous is not None and profile.factors != previous.factors:
            print(
                "Factors that were fitted to the rates before are left out; m6 plan validate RUN... --profile "
                f"{out} --refit {out} fits new ones."
            )


@app.command()
def validate(
    runs: Annotated[list[Path], typer.Argument(help="folders of finished runs")],
    profile: ProfileFile = None,
    refit: Annotated[Path | None, typer.Option(help="profile to write, with factors fitted to these runs")] = None,
) -> None:
    """Compares the predicted memory and time of runs with the measured ones, as the profile predicts them.

    Without a profile the rates are those that each run was predicted with at its start. Factors for --refit are fitted
    to the rates of --profile, without it to the assumed ones.
    """
    from m6.errors import UserError
    from m6.planning.machine.profile import Profile, load_profile, save_profile
    from m6.planning.prediction import read_outcome, validation_table
    from m6.planning.prediction import refit as fit

    calibration = Profile() if profile is None else load_profile(profile)
    if refit is not None and profile is None and refit.exists():
        raise UserError(f"--refit {refit}: exists; choose a new file, or give the profile to fit with --profile")
    # The factors are saved with these rates, so they have to be fitted to predictions with the same rates.
    anew = profile is not None or refit is not None
    outcomes = [read_outcome(run, calibration if anew else None) for run in runs]
    if refit is not None:
        calibration = fit(calibration, outcomes)
        save_profile(calibration, refit)
    print(validation_table(outcomes, calibration))


def _planner(
    config: Path,
    cluster: Path,
    overrides: list[str] | None,
    force: list[str] | None,
    profile: Path | None,
    memory_fraction: float,
    stage: Literal["pseudo", "real"] = "real",
) -> Callable[[int | None], Planner]:
    """Reads all files once, and returns a function from the number of devices (None: all) to a planner.

    Raises:
        UserError: a file or a value is wrong, or the run has no Pseudo phase.
    """
    from m6.config.checks import check_has_model
    from m6.config.run import load_config
    from m6.errors import UserError
    from m6.planning.machine.cluster import load_cluster
    from m6.planning.machine.profile import Profile, load_profile

    settings = load_config(config, tuple(overrides or ()))
    check_has_model(settings, config)
    whole: Cluster = load_cluster(cluster)
    calibration = Profile() if profile is None else load_profile(profile)
    if stage == "pseudo" and settings.m6.pseudo_to_real is None:
        raise UserError(f"--stage pseudo: {config} has no section m6.pseudo_to_real")
    from m6.planning.search.configuration import parse_forced
    from m6.planning.search.planner import Planner
    from m6.planning.search.stages import pseudo_sharing

    sharing = pseudo_sharing(settings) if stage == "pseudo" else None
    forced: dict[str, Any] = parse_forced(tuple(force or ()))

    # Cached: frontier and curve ask for the same numbers of devices several times.
    @functools.cache
    def make(world: int | None) -> Planner:
        part = whole if world is None else whole.scaled(world)
        return Planner(settings, part, calibration, None, sharing, memory_fraction, forced)

    return make


@app.command()
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
    """Chooses the layout of a run with m6.elastic for the nodes of a job, and records why.

    The job scripts call it before each attempt.
    """
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
