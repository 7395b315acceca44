"""Makes a corpus from its recipe: plans it, runs or submits all stages, and removes temporary files.

Stages run in local processes or as Slurm jobs. datatrove's local executor is not used: if one of its processes is
killed, for example for its memory, it waits forever.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from m6.corpus.counters import Counters
from m6.corpus.inputs import Checksums
from m6.corpus.output import is_built
from m6.corpus.plan import PLAN_NAME, load_plan, make_plan
from m6.corpus.recipe import CorpusRecipe
from m6.corpus.stages import run_task, unfinished
from m6.corpus.text_copies import hashes_of_set, require_datatrove
from m6.corpus.work import OpenScorer, Work, is_finished, prepare, remove, work_folder
from m6.errors import UserError
from m6.lock import FolderLock


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
    with ProcessPoolExecutor(num_tasks, mp_context=context, initializer=_end_with_parent) as pool:
        for stage in unfinished(work):
            tasks = min(num_tasks, stage.units(work))
            given = (tasks, work.open_scorer)
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
    from m6.corpus.slurm import check_jobs_ended, submit

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
