"""Submits the stages of a corpus as arrays of Slurm jobs, with datatrove's executor.

Written for datatrove 0.10. Its completion marks are not used, since they depend on neither recipe nor inputs.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from datatrove.executor import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from m6 import files
from m6.corpus.recipe import SlurmSettings
from m6.corpus.stages import Stage, run_task, unfinished
from m6.corpus.work import OpenScorer, Work
from m6.errors import UserError
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
