"""The folder of a corpus that is being built: where each stage writes, and which units are complete.

    OUT.work/checksums.jsonl              of inputs, one by one as they are made for the plan
    OUT.work/plan.json                    recipe, inputs and checksums
    OUT.work/STAGE/...                    what a stage writes
    OUT.work/done/STAGE/00003.json        unit 3 of a stage is complete; holds what it counted

A unit is complete when its file in ``done`` exists. That file is written atomically after all that the unit writes, and
a unit always writes the same bytes: an interrupted unit is done again, and nothing else is lost.

A trained model may score how well captions describe their pictures. Models lie above the data in the order of imports,
so the caller passes the function that opens one.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from m6 import files
from m6.corpus.documents import read_documents
from m6.corpus.plan import PLAN_NAME, Plan, load_plan
from m6.corpus.recipe import CorpusRecipe
from m6.corpus.tally import Tally
from m6.errors import UserError
from m6.files import atomic_path
from m6.validation import validate


class Work:
    """A work folder with its recipe and plan.

    Args:
        folder: a work folder that ``prepare`` made.
        open_scorer: opens the recipe's ``matching_model``; for a recipe that has one.

    Raises:
        UserError: there is no plan.
    """

    def __init__(self, folder: Path, open_scorer: OpenScorer | None = None) -> None:
        self.folder, self.open_scorer = folder, open_scorer
        self.plan = load_plan(folder / PLAN_NAME)
        out = folder.with_name(folder.name.removesuffix(".work"))
        self.recipe = validate(CorpusRecipe, self.plan.recipe | {"out": str(out)}, "recipe")

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.plan.parts)

    @cached_property
    def num_text_parts(self) -> int:
        """Number of parts with texts."""
        return sum(self.plan.kind(part) == "text" for part in self.plan.parts)

    def documents(self, part: int) -> Path:
        """The cleaned documents of a part."""
        return self.folder / "clean" / f"{part:05d}.parquet"

    def fetched(self, part: int) -> Path:
        """The remote files of a part while they are read."""
        return self.folder / "fetched" / f"{part:05d}"

    @property
    def pictures(self) -> Path:
        """Keys and thumbnails of the pictures of all parts, and the near duplicates among them."""
        return self.folder / "pictures"

    def scores(self, part: int) -> Path:
        """How well the captions of a part describe their pictures."""
        return self.folder / "match" / f"{part:05d}.npy"

    def min_match(self, part: int) -> float:
        """The least of these scores that is kept; 0: none is asked for."""
        planned = self.plan.parts[part]
        if planned.input in self.plan.sets or self.plan.kind(planned) == "text":
            return 0.0
        return self.recipe.picture_filters_of(planned.input).min_match

    @cached_property
    def scorer(self) -> PictureScorer:
        """The model that compares pictures with captions.

        Raises:
            UserError: it is missing, or another one than when the corpus was begun.
        """
        assert self.open_scorer is not None
        assert self.recipe.matching_model is not None
        scorer = self.open_scorer(self.recipe.matching_model)
        if scorer.identity != self.plan.scorer:
            raise UserError(
                f"matching_model {self.recipe.matching_model} has changed since {self.folder} was begun; remove the "
                "folder to begin anew"
            )
        return scorer

    def decisions(self, part: int) -> Path:
        """Which documents of a part are copies, and of what."""
        return self.folder / "select" / f"{part:05d}.npz"

    def is_done(self, stage: str, unit: int) -> bool:
        """Whether a unit of a stage is complete."""
        return self._marker(stage, unit).exists()

    def missing(self, stage: str, units: int) -> list[int]:
        """Returns the units of a stage that are not complete."""
        folder = self.folder / "done" / stage
        done = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
        return [unit for unit in range(units) if self._marker(stage, unit).name not in done]

    def mark_done(self, stage: str, unit: int, tally: Tally) -> None:
        """Says that a unit is complete, and what it counted."""
        files.write_text(self._marker(stage, unit), tally.model_dump_json() + "\n")

    def tally(self, stage: str, unit: int) -> Tally:
        """Returns what a complete unit counted."""
        marker = self._marker(stage, unit)
        try:
            return Tally.model_validate_json(marker.read_bytes())
        except ValidationError as error:
            raise UserError(f"{marker} is damaged ({error.errors()[0]['msg']}); remove it") from None

    def _marker(self, stage: str, unit: int) -> Path:
        return self.folder / "done" / stage / f"{unit:05d}.json"


def work_folder(out: Path) -> Path:
    """Returns the work folder of a data folder."""
    return out.with_name(f"{out.name}.work")


def is_finished(folder: Path) -> bool:
    """Whether the last unit of the corpus with this work folder is marked: no job of it writes any more."""
    return (folder / "done" / "finish" / "00000.json").exists()


def prepare(folder: Path, plan: Plan, open_scorer: OpenScorer | None = None) -> Work:
    """Begins a work folder, or continues the one of the same plan.

    Args:
        folder, open_scorer: as in ``Work``.
        plan: what is made in it.

    Raises:
        UserError: the folder belongs to another recipe, or an input has changed since.
    """
    file = folder / PLAN_NAME
    if file.exists():
        begun = load_plan(file)
        if begun.contents() != plan.contents():
            raise UserError(f"{folder} was begun with {_difference(begun, plan)}; remove it to begin anew")
    elif (done := folder / "done").exists():  # by the last job of another corpus, which marks its end at the very end
        shutil.rmtree(done)
    # Also over an equal plan: files may have the contents of before and another time, by which tasks know them.
    files.write_text(file, plan.model_dump_json(indent=2) + "\n")
    return Work(folder, open_scorer)


def remove(folder: Path) -> None:
    """Removes a work folder; if it has logs, all but these.

    The marks of complete units go before what they stand for, and the plan, by which another corpus is refused, last.
    """
    shutil.rmtree(folder / "done", ignore_errors=True)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and path.name != "logs":
            shutil.rmtree(path)
        elif path.name not in ("logs", PLAN_NAME):
            path.unlink()
    (folder / PLAN_NAME).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it has logs, or is not there
        folder.rmdir()


def _difference(begun: Plan, plan: Plan) -> str:
    for key in sorted({*begun.recipe, *plan.recipe}):
        if begun.recipe.get(key) != plan.recipe.get(key):
            return f"another recipe: its {key} differs"
    if begun.scorer != plan.scorer:
        return "another checkpoint of its matching_model"
    before = {file.path: file.sha256 for file in begun.files}
    for file in plan.files:
        if file.path not in before:
            return f"other inputs: {file.path} is new"
        if before.pop(file.path) != file.sha256:
            return f"other inputs: {file.path} has changed"
    return f"other inputs: {next(iter(before))} is gone" if before else "other versions of its inputs"


_SCORED = 512  # pictures at a time: always the same ones together, whatever the number of tasks


class PictureScorer(Protocol):
    """A model that compares pictures with captions.

    Attributes:
        identity: checksum of what determines the scores.
    """

    identity: str

    def __call__(self, pictures: Sequence[bytes], captions: Sequence[str]) -> NDArray[np.float64]:
        """Returns the probability that each caption describes its picture file, float64 [N]."""
        ...


OpenScorer = Callable[[Path], PictureScorer]


"""Opens the model of a folder. Other processes get it pickled, so it is a function or a class of a module."""


def score_part(work: Work, part: int) -> Tally:
    """Writes the scores of the pictures of a part whose input has a threshold: float64 [documents]."""
    if work.min_match(part) > 0:
        scores = [np.empty(0, dtype=np.float64)]
        documents = read_documents(work.documents(part))
        while rows := list(islice(documents, _SCORED)):
            pictures = [row.image for row in rows if row.image is not None]
            scores.append(work.scorer(pictures, [row.text for row in rows]))
        with atomic_path(work.scores(part)) as temporary, temporary.open("wb") as file:
            np.save(file, np.concatenate(scores))
    return Tally()


def mismatched(work: Work, part: int, documents: int) -> NDArray[np.bool_]:
    """Returns which documents of a part have a caption that does not describe the picture, bool [documents]."""
    threshold = work.min_match(part)
    if threshold == 0:
        return np.zeros(documents, dtype=bool)
    return np.load(work.scores(part)) < threshold
