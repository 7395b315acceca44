"""Makes a corpus from its recipe: plans it, runs or submits all stages, and removes temporary files.

Stages run in local processes or as Slurm jobs. datatrove's local executor is not used: if one of its processes is
killed, for example for its memory, it waits forever.

Jobs of Slurm go through datatrove's executor (0.10). Its completion marks are not used, since they depend on neither
recipe nor inputs.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from m6 import files
from m6.corpus.counters import Counters
from m6.corpus.inputs import Checksums
from m6.corpus.output import is_built
from m6.corpus.plan import PLAN_NAME, load_plan, make_plan
from m6.corpus.recipe import CorpusRecipe, SlurmSettings
from m6.corpus.stages import Stage, run_task, unfinished
from m6.corpus.text_copies import hashes_of_set, require_datatrove
from m6.corpus.work import OpenScorer, Work, is_finished, prepare, remove, work_folder
from m6.data.workers import naming_the_start
from m6.errors import UserError
from m6.lock import FolderLock
from m6.validation import read_document

MAX_TASKS = 1000  # more tasks would need several arrays, and the next stage would wait only for the last array
_JOBS_NAME = "jobs.json"
_FORGOTTEN = "Invalid job id"  # squeue's message for a job that ended some minutes ago

# datatrove logs every step on stderr, and prints an error before raising it.
logger.disable("datatrove")


class StageStep(PipelineStep):
    """The work of one task in a stage, as a step of datatrove."""

    name = "m6"
    type = "corpus"

    def __init__(self, folder: Path, stage: str, open_scorer: OpenScorer | None) -> None:
        super().__init__()
        self.folder, self.stage, self.open_scorer = folder, stage, open_scorer

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Runs the units of this task."""
        run_task(self.folder, self.stage, rank, world_size, self.open_scorer)


class _Executor(SlurmPipelineExecutor):
    """datatrove's executor without unset options, and without the jobs to merge datatrove's own statistics."""

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        return {name: value for name, value in super().get_sbatch_args(max_array).items() if value is not None}

    def launch_merge_stats(self) -> None:
        pass


def submit(work: Work, num_tasks: int, settings: SlurmSettings) -> dict[str, str]:
    """Submits an array of jobs for each incomplete stage. Each array waits for the one before.

    If a task fails, Slurm cancels the arrays after it. The same command then submits the incomplete stages.

    Args:
        work: the corpus; its folder, the inputs and the environment must be on a shared file system.
        num_tasks: most tasks of a stage.
        settings: resources of a task.

    Returns:
        The job id of each stage.

    Raises:
        UserError: there are too many tasks for one array, Slurm refuses the jobs, or this process itself runs in a
            Slurm array.
    """
    if num_tasks > MAX_TASKS:
        raise UserError(f"--tasks {num_tasks}: at most {MAX_TASKS} with --executor slurm; a task can have many parts")
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        raise UserError("m6 data corpus --executor slurm cannot be run inside of an array of Slurm jobs")
    jobs: dict[str, str] = {}
    before: _Executor | None = None
    for stage in unfinished(work):
        before = _executor(work, stage, min(num_tasks, stage.units(work)), settings, before)
        try:
            before.run()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(f'stage "{stage.name}" cannot be submitted: {error}') from None
        jobs[stage.name] = before.job_id
        files.write_json(work.folder / _JOBS_NAME, jobs)
    return jobs


def check_jobs_ended(folder: Path) -> None:
    """Checks that all jobs on this work folder have ended.

    Raises:
        UserError: jobs have not ended, or squeue fails.
    """
    file = folder / _JOBS_NAME
    if not file.exists():
        return
    jobs = ",".join(read_document(file).values())
    try:
        listed = subprocess.run(
            ["squeue", "--noheader", "--format=%F", f"--jobs={jobs}"], capture_output=True, text=True
        )
        problem = listed.stderr.strip() if listed.returncode else ""
    except FileNotFoundError as error:
        problem = str(error)
    if problem and _FORGOTTEN not in problem:
        raise UserError(
            f"{file}: Slurm does not say whether jobs {jobs} have ended ({problem}); if so, remove the file"
        )
    if waiting := sorted(set(listed.stdout.split())):
        raise UserError(f"{folder}: jobs {', '.join(waiting)} have not ended; wait for them, or cancel them")


def _executor(work: Work, stage: Stage, tasks: int, settings: SlurmSettings, before: _Executor | None) -> _Executor:
    hours, minutes = divmod(settings.time_limit_min, 60)
    return _Executor(
        pipeline=[StageStep(work.folder, stage.name, work.open_scorer)],
        tasks=tasks,
        time=f"{hours}:{minutes:02d}:00",
        partition=settings.partition,
        mem_per_cpu_gb=settings.memory_gb,
        job_name=f"m6-{stage.name}",
        qos=None,
        env_command=f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        sbatch_args={"account": settings.account, "kill-on-invalid-dep": "yes"},
        depends=before,
        logging_dir=str(work.folder / "logs" / stage.name),
        skip_completed=False,
        requeue_signals=None,
    )


def run_locally(work: Work, num_tasks: int) -> None:
    """Runs all incomplete stages. A single task runs in this process.

    Args:
        work: the corpus.
        num_tasks: number of processes.

    Raises:
        UserError: a unit failed by a user's mistake, or a process died.
    """
    if num_tasks == 1:
        for stage in unfinished(work):
            run_task(work.folder, stage.name, 0, 1, work.open_scorer)
        return
    # Spawn, because a fork of a process with threads (pyarrow has some) may deadlock.
    context = multiprocessing.get_context("spawn")
    with naming_the_start("--tasks", num_tasks, 1):
        processes = ProcessPoolExecutor(num_tasks, mp_context=context, initializer=_end_with_parent)
    with processes as pool:
        for stage in unfinished(work):
            tasks = min(num_tasks, stage.units(work))
            given = (tasks, work.open_scorer)
            with naming_the_start("--tasks", num_tasks, 1):
                futures = [pool.submit(run_task, work.folder, stage.name, task, *given) for task in range(tasks)]
            try:
                for future in as_completed(futures):
                    future.result()
            except BrokenProcessPool:
                raise UserError(
                    f'{work.folder}: a process of stage "{stage.name}" died, probably out of memory; the same command '
                    "continues, with fewer --tasks if memory is short"
                ) from None


def _end_with_parent() -> None:
    """Ends this process when its parent dies. Otherwise it and a new launch would write the same files."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


Executor = Literal["local", "slurm"]
_CHECKSUMS_NAME = "checksums.jsonl"


@dataclass(frozen=True)
class Launched:
    """The result of a launch.

    Attributes:
        out: the data folder.
        was_built: whether the data folder was already built.
        jobs: ids of submitted jobs by stage; empty if the data folder is finished.
    """

    out: Path
    was_built: bool = False
    jobs: dict[str, str] = field(default_factory=dict)


def make_corpus(
    recipe: CorpusRecipe, executor: Executor, num_tasks: int, open_scorer: OpenScorer | None = None
) -> Launched:
    """Makes a corpus, or continues an interrupted one.

    The same recipe and inputs give the same bytes for any number of tasks and for both executors.

    Args:
        recipe: the recipe.
        executor: local processes, or arrays of Slurm jobs.
        num_tasks: most tasks of a stage.
        open_scorer: opens the recipe's ``matching_model``; needed only if the recipe has one.

    Raises:
        UserError: an input or the model is missing, a named set would protect nothing, ``recipe.out`` or the work
            folder holds something else, jobs of this corpus have not ended, or a stage failed by a user's mistake.
    """
    require_datatrove()
    out = recipe.out.resolve()
    recipe = recipe.model_copy(update={"out": out})
    folder = work_folder(out)
    with FolderLock(out.with_name(f"{out.name}.lock"), out):
        if not is_finished(folder):
            check_jobs_ended(folder)
        for named in recipe.decontamination.sets:  # fails now, not after hours of work
            next(hashes_of_set(named, recipe.decontamination.ngram_chars, Counters()))
        known = load_plan(folder / PLAN_NAME).files if (folder / PLAN_NAME).exists() else []
        plan = make_plan(recipe, Checksums(known, folder / _CHECKSUMS_NAME))
        if recipe.matching_model is not None:
            assert open_scorer is not None
            plan.scorer = open_scorer(recipe.matching_model).identity
        if is_built(out, plan):
            remove(folder)
            return Launched(out, was_built=True)
        work = prepare(folder, plan, open_scorer)
        if executor == "slurm":
            return Launched(out, jobs=submit(work, num_tasks, recipe.slurm))
        run_locally(work, num_tasks)
        remove(folder)
    return Launched(out)
