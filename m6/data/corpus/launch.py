"""Makes a corpus from its recipe: plans, runs or submits all stages, and removes what is no longer needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from m6.data.corpus.contamination import hashes_of_set
from m6.data.corpus.input_files import Checksums
from m6.data.corpus.local import run_locally
from m6.data.corpus.matching import OpenScorer
from m6.data.corpus.minhash import require_datatrove
from m6.data.corpus.output import is_built
from m6.data.corpus.plan import PLAN_NAME, load_plan, make_plan
from m6.data.corpus.recipe import CorpusRecipe
from m6.data.corpus.tally import Tally
from m6.data.corpus.work import is_finished, prepare, remove, work_folder
from m6.lock import FolderLock

Executor = Literal["local", "slurm"]
_CHECKSUMS_NAME = "checksums.jsonl"


@dataclass(frozen=True)
class Launched:
    """What a launch did.

    Attributes:
        out: the data folder.
        was_built: whether it was there already.
        jobs: submitted jobs by stage; empty: the data folder is finished.
    """

    out: Path
    was_built: bool = False
    jobs: dict[str, str] = field(default_factory=dict)


def make_corpus(
    recipe: CorpusRecipe, executor: Executor, num_tasks: int, open_scorer: OpenScorer | None = None
) -> Launched:
    """Makes a corpus, or continues one that was interrupted.

    The same recipe and inputs give the same bytes for any number of tasks and either executor.

    Args:
        recipe: the recipe.
        executor: processes of this machine, or arrays of Slurm jobs.
        num_tasks: tasks of a stage.
        open_scorer: opens the recipe's ``matching_model``; for a recipe that has one.

    Raises:
        UserError: an input or the model is missing, a named set would protect nothing, ``recipe.out`` or the work
            folder belongs to something else, jobs of this corpus have not ended, or a stage failed because of a user's
            mistake.
    """
    require_datatrove()
    from m6.data.corpus.slurm import check_jobs_ended, submit

    out = recipe.out.resolve()
    recipe = recipe.model_copy(update={"out": out})
    folder = work_folder(out)
    with FolderLock(out.with_name(f"{out.name}.lock"), out):
        if not is_finished(folder):
            check_jobs_ended(folder)
        for named in recipe.decontamination.sets:  # now, not after hours of work
            next(hashes_of_set(named, recipe.decontamination.ngram_chars, Tally()))
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
