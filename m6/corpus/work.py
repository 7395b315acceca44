"""The work folder of a corpus during its build: documents between the stages, and marks of complete units.

    OUT.work/checksums.jsonl              of inputs, one by one as they are made for the plan
    OUT.work/plan.json                    recipe, inputs and checksums
    OUT.work/STAGE/...                    what a stage writes
    OUT.work/done/STAGE/00003.json        unit 3 of a stage is complete; holds what it counted

A unit is complete when its file in ``done`` exists. This file is written atomically after all output of the unit. A
unit always writes the same bytes, so an interrupted unit is simply run again.

A trained model may score how well captions describe their images. This package must not import models, so the caller
passes a function to open one.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import ValidationError

from m6 import files
from m6.corpus.counters import Counters
from m6.corpus.plan import PLAN_NAME, Plan, load_plan
from m6.corpus.recipe import CorpusRecipe
from m6.data.manifest import Split
from m6.data.sources.base import Row
from m6.errors import UserError
from m6.files import atomic_path
from m6.validation import describe, validate

_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("split", pa.string()),
        pa.field("text", pa.string(), nullable=False),
        pa.field("image", pa.binary()),
        pa.field("answer", pa.string()),
        pa.field("caption", pa.uint64(), nullable=False),
        pa.field("key", pa.uint64(), nullable=False),
        pa.field("order", pa.uint64(), nullable=False),
        pa.field("size", pa.uint32(), nullable=False),
        pa.field("held_out", pa.uint8(), nullable=False),
    ]
)
_GROUP_BYTES = 8 << 20
_READ_ROWS = 64
_COLUMNS = ["id", "group", "split", "text", "image", "answer"]
_NAMED = 0
_HELD_OUT: dict[Split | None, int] = {"test": 1, "validation": 2, "train": 3, None: 3}


@dataclass(frozen=True)
class Ranking:
    """Data for choosing the kept document among copies: arrays of one entry per document.

    Attributes:
        key: digest of a text's compared form or of an image's pixels. Equal documents have equal keys; uint64.
        held_out: 0 for an image of a named set, 1 for the test split of its source, 2 for validation, 3 for others;
            uint8.
        size: characters of a text, or pixels of an image file; uint32.
        order: digest of text and id, to break ties; uint64.
        caption: digest of the compared form of a caption; 0 for a text; uint64.
    """

    key: NDArray[np.uint64]
    held_out: NDArray[np.uint8]
    size: NDArray[np.uint32]
    order: NDArray[np.uint64]
    caption: NDArray[np.uint64]


class DocumentWriter:
    """Writes the documents of a part. The file gets its final name if the context ends without an exception."""

    def __init__(self, file: Path) -> None:
        self._atomic = atomic_path(file)
        self._rows: list[dict[str, object]] = []
        self._pending = 0

    def __enter__(self) -> DocumentWriter:
        self._writer = pq.ParquetWriter(self._atomic.__enter__(), _SCHEMA, compression="zstd")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
        self._writer.close()
        self._atomic.__exit__(kind, error, trace)

    def write(self, row: Row, key: int, order: int, size: int, caption: int = 0, is_named: bool = False) -> None:
        """Appends a document with a group.

        Args:
            row: the document.
            key, order, size, caption: as in ``Ranking``.
            is_named: whether it is an image of a named set.
        """
        values: dict[str, object] = {name: getattr(row, name) for name in _COLUMNS}
        held_out = _NAMED if is_named else _HELD_OUT[row.split]
        ranks = {"key": key, "order": order, "size": size, "caption": caption, "held_out": held_out}
        self._rows.append(values | ranks)
        self._pending += len(row.text) + len(row.image or b"")
        if self._pending >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=_SCHEMA))
        self._rows, self._pending = [], 0


def read_documents(file: Path) -> Iterator[Row]:
    """Yields the documents of a part in order."""
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(_READ_ROWS, columns=_COLUMNS):
            for values in batch.to_pylist():
                yield Row(**values)


def read_ranking(file: Path) -> Ranking:
    """Reads the ranking of the documents of a part, without their texts."""
    names = [field.name for field in fields(Ranking)]
    table = pq.read_table(file, columns=names)
    return Ranking(**{name: table[name].to_numpy() for name in names})


def read_document(file: Path, number: int) -> Row:
    """Reads one document of a part by its number; IndexError if there is none."""
    with pq.ParquetFile(file) as table:
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if number < rows:
                part = table.read_row_group(group, columns=_COLUMNS)
                return Row(**part.slice(number, 1).to_pylist()[0])
            number -= rows
    raise IndexError(number)


class Work:
    """A work folder with its recipe and plan.

    Args:
        folder: a work folder made by ``prepare``.
        open_scorer: opens the recipe's ``matching_model``; needed only if the recipe has one.

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
        """File of the cleaned documents of a part."""
        return self.folder / "clean" / f"{part:05d}.parquet"

    def fetched(self, part: int) -> Path:
        """Folder of the remote files of a part while they are read."""
        return self.folder / "fetched" / f"{part:05d}"

    @property
    def pictures(self) -> Path:
        """Folder of keys and thumbnails of all images, and of the near duplicates among them."""
        return self.folder / "pictures"

    def scores(self, part: int) -> Path:
        """File of the match scores of a part's captions and images."""
        return self.folder / "match" / f"{part:05d}.npy"

    def min_match(self, part: int) -> float:
        """Returns the smallest accepted match score of a part; 0: no scores are needed."""
        planned = self.plan.parts[part]
        if planned.input in self.plan.sets or self.plan.kind(planned) == "text":
            return 0.0
        return self.recipe.picture_filters_of(planned.input).min_match

    @cached_property
    def scorer(self) -> PictureScorer:
        """The model for image-text matching.

        Raises:
            UserError: the model is missing, or has changed since the corpus was begun.
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
        """File of the status of each document of a part, and of the kept document of each copy."""
        return self.folder / "select" / f"{part:05d}.npz"

    def is_done(self, stage: str, unit: int) -> bool:
        """Whether a unit of a stage is complete."""
        return self._marker(stage, unit).exists()

    def missing(self, stage: str, units: int) -> list[int]:
        """Returns the incomplete units of a stage."""
        folder = self.folder / "done" / stage
        done = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
        return [unit for unit in range(units) if self._marker(stage, unit).name not in done]

    def mark_done(self, stage: str, unit: int, counters: Counters) -> None:
        """Marks a unit as complete, and stores its counts."""
        files.write_text(self._marker(stage, unit), counters.model_dump_json() + "\n")

    def counters(self, stage: str, unit: int) -> Counters:
        """Returns the counts of a complete unit; UserError if its file is damaged."""
        marker = self._marker(stage, unit)
        try:
            return Counters.model_validate_json(marker.read_bytes())
        except ValidationError as error:
            raise UserError(f"{marker} is damaged ({describe(error, Counters, '')}); remove it") from None

    def _marker(self, stage: str, unit: int) -> Path:
        return self.folder / "done" / stage / f"{unit:05d}.json"


def work_folder(out: Path) -> Path:
    """Returns the work folder of a data folder."""
    return out.with_name(f"{out.name}.work")


def is_finished(folder: Path) -> bool:
    """Whether the last unit of this work folder is complete: no job writes to it any more."""
    return (folder / "done" / "finish" / "00000.json").exists()


def prepare(folder: Path, plan: Plan, open_scorer: OpenScorer | None = None) -> Work:
    """Begins a work folder, or continues one with the same plan.

    Args:
        folder, open_scorer: as in ``Work``.
        plan: the plan of the corpus.

    Raises:
        UserError: the folder belongs to another recipe, or an input has changed since it was begun.
    """
    file = folder / PLAN_NAME
    if file.exists():
        begun = load_plan(file)
        if begun.contents() != plan.contents():
            raise UserError(f"{folder} was begun with {_difference(begun, plan)}; remove it to begin anew")
    elif (done := folder / "done").exists():  # left by the last job of another corpus
        shutil.rmtree(done)
    # Written even over an equal plan: tasks compare file times, and a file may have a new time and the same contents.
    files.write_text(file, plan.model_dump_json(indent=2) + "\n")
    return Work(folder, open_scorer)


def remove(folder: Path) -> None:
    """Removes a work folder, except its logs.

    Marks of complete units are removed before the outputs they describe. The plan is removed last, since it makes
    another corpus refuse the folder.
    """
    shutil.rmtree(folder / "done", ignore_errors=True)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and path.name != "logs":
            shutil.rmtree(path)
        elif path.name not in ("logs", PLAN_NAME):
            path.unlink()
    (folder / PLAN_NAME).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder has logs, or is gone
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


_SCORED = 512  # images of a batch: the batches do not depend on the number of tasks


class PictureScorer(Protocol):
    """A model for image-text matching.

    Attributes:
        identity: checksum of everything that determines the scores.
    """

    identity: str

    def __call__(self, pictures: Sequence[bytes], captions: Sequence[str]) -> NDArray[np.float64]:
        """Returns the probability that each caption describes its image file, float64 [N]."""
        ...


OpenScorer = Callable[[Path], PictureScorer]


"""Opens the model in a folder. It is pickled for other processes, so it must be a function or class of a module."""


def score_part(work: Work, part: int) -> Counters:
    """Writes the match scores of a part's images, float64 [documents]; nothing if its input has no threshold."""
    if work.min_match(part) > 0:
        scores = [np.empty(0, dtype=np.float64)]
        documents = read_documents(work.documents(part))
        while rows := list(islice(documents, _SCORED)):
            pictures = [row.image for row in rows if row.image is not None]
            scores.append(work.scorer(pictures, [row.text for row in rows]))
        with atomic_path(work.scores(part)) as temporary, temporary.open("wb") as file:
            np.save(file, np.concatenate(scores))
    return Counters()


def mismatched(work: Work, part: int, documents: int) -> NDArray[np.bool_]:
    """Returns whether the caption of each document is below the match threshold, bool [documents]."""
    threshold = work.min_match(part)
    if threshold == 0:
        return np.zeros(documents, dtype=bool)
    return np.load(work.scores(part)) < threshold
