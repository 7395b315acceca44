"""Building a data folder: sources in, checked and split Parquet shards with a manifest out."""

import collections
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from tqdm import tqdm

from m6.data.manifest import (
    MANIFEST_NAME,
    SKIPPED_NAME,
    SPLITS,
    Kind,
    Manifest,
    Origin,
    SourceEntry,
    Split,
    SplitEntry,
)
from m6.data.shards import ShardWriter
from m6.data.sources.base import Row, Source
from m6.data.sources.pictures import BadPicture, encode
from m6.data.sources.text import clean
from m6.errors import UserError, nearest

LISTED_SKIPS = 100
CHUNK_ROWS = 32  # rows that travel to a worker process together


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """What decides the contents of a data folder, besides its sources.

    ``limit`` is the most rows of every source, but of those that ``limits`` names.
    """

    image_size: int = 64
    passage_chars: int = 256
    limit: int | None = None
    limits: dict[str, int] = field(default_factory=dict)
    validation_share: float = 0.01
    test_share: float = 0.01
    max_bad_share: float = 0.01

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("image_size", "passage_chars", "limit")}
        for name, value in (counts | {f"limit of {source}": limit for source, limit in self.limits.items()}).items():
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; expected at least 1")
        for name in ("validation_share", "test_share", "max_bad_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} is {getattr(self, name)}; expected a share from 0 to 1")
        if self.validation_share + self.test_share >= 1:
            raise UserError(
                f"validation_share {self.validation_share} and test_share {self.test_share} leave nothing to train on"
            )


def build(sources: list[Source], out: Path, settings: BuildSettings, workers: int = 1) -> tuple[Manifest, bool]:
    """Builds ``out`` and returns its manifest and True, or False where ``out`` holds this very set already.

    The folder appears complete or not at all. The same sources and settings give the same bytes, whatever the
    number of ``workers`` (processes that convert pictures). UserError when ``out`` holds something else, when a
    source has no usable row, or when more than ``max_bad_share`` of its rows are bad.
    """
    repeated = [name for name, n in collections.Counter(source.name for source in sources).items() if n > 1]
    if repeated:
        raise UserError(f'two sources are called "{repeated[0]}"; name one with CALLED=PATH')
    for name in settings.limits:
        if name not in (names := [source.name for source in sources]):
            raise UserError(f'a limit for "{name}", which is not among the sources{nearest(name, names)}')
    out = out.resolve()
    origins = {source.name: source.origin() for source in sources}
    recipe = {name: value for name, value in asdict(settings).items() if name != "max_bad_share" and value != {}}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        existing = Manifest.load(out) if (out / MANIFEST_NAME).is_file() else None
        if existing is not None and _describes(existing, recipe, origins):
            return existing, False
        raise UserError(f"{out} is not empty and is not this data set; choose another folder or remove it")

    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        entries: dict[str, SourceEntry] = {}
        with (partial / SKIPPED_NAME).open("w", encoding="utf-8") as skipped:
            for source in sources:
                splits, counts = _build_source(source, partial, settings, workers, skipped)
                licence = " AND ".join(dict.fromkeys(origin.licence for origin in origins[source.name]))
                entries[source.name] = SourceEntry(
                    kind=source.kind, licence=licence, origin=origins[source.name], splits=splits, skipped=counts
                )
        manifest = Manifest(recipe=recipe, sources=entries)
        manifest.save(partial)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Manifest.load(out), True


def assign_split(group: str, validation_share: float, test_share: float) -> Split:
    """The split of a group: a function of the group's name alone, so that it never depends on other rows.

    It takes 8 bytes of SHA-256 as a number in [0, 1): below ``test_share`` is test, then validation, then train.
    A larger share therefore only moves groups out of training.
    """
    place = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64
    if place < test_share:
        return "test"
    return "validation" if place < test_share + validation_share else "train"


def _describes(manifest: Manifest, recipe: dict[str, Any], origins: dict[str, list[Origin]]) -> bool:
    return manifest.recipe == recipe and {n: e.origin for n, e in manifest.sources.items()} == origins


def _build_source(
    source: Source, folder: Path, settings: BuildSettings, workers: int, skip_list: IO[str]
) -> tuple[dict[Split, SplitEntry], dict[str, int]]:
    test_share = 0.0 if source.own_test_split else settings.test_share
    skipped: collections.Counter[str] = collections.Counter()
    limit = settings.limits.get(source.name, settings.limit)
    rows = tqdm(
        itertools.islice(source.rows(), limit),
        desc=source.name,
        unit=" rows",
        total=limit,
        disable=None,  # silent unless on a terminal
    )
    with ExitStack() as stack:
        writers = {split: stack.enter_context(ShardWriter(folder, split, source.name)) for split in SPLITS}
        for row, problem in _checked(rows, source.kind, settings, workers):
            if problem:
                skipped[problem] += 1
                if skipped.total() <= LISTED_SKIPS:
                    entry = {"source": source.name, "id": row.id, "reason": problem}
                    skip_list.write(json.dumps(entry, ensure_ascii=False) + "\n")
                continue
            split = row.split or assign_split(row.group, settings.validation_share, test_share)
            columns = ("id", "text", "image", "question", "answer", "group")
            writers[split].write({name: getattr(row, name) for name in columns} | {"source": source.name})
    splits = {cast(Split, split): SplitEntry.of(writer.shards) for split, writer in writers.items()}
    usable = sum(entry.rows for entry in splits.values())
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.most_common())
    if not usable:
        raise UserError(f'source "{source.name}" has no usable row ({reasons or "it is empty"}); nothing was written')
    share = skipped.total() / (usable + skipped.total())
    if share > settings.max_bad_share:
        raise UserError(
            f'source "{source.name}": {share:.1%} of the rows are bad ({reasons}), more than --max-bad-share '
            f"{settings.max_bad_share:.1%}; nothing was written"
        )
    return splits, dict(skipped.most_common())


def _checked(
    rows: Iterable[Row], kind: Kind, settings: BuildSettings, workers: int
) -> Iterator[tuple[Row, str | None]]:
    """Checks rows in order; pictures in worker processes, with a bounded number of chunks in flight."""
    if workers == 1 or kind in ("text", "labelled_text"):
        yield from (check_row(row, kind, settings) for row in rows)
        return
    source = iter(rows)
    waiting: collections.deque[Future[list[tuple[Row, str | None]]]] = collections.deque()
    # Spawned, because forking a process that has threads may hang.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            while chunk := list(itertools.islice(source, CHUNK_ROWS)):
                waiting.append(pool.submit(_check_chunk, chunk, kind, settings))
                if len(waiting) >= 4 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError("a worker process died, probably out of memory; try fewer --workers") from None
        finally:
            for future in waiting:
                future.cancel()


def _check_chunk(rows: list[Row], kind: Kind, settings: BuildSettings) -> list[tuple[Row, str | None]]:
    return [check_row(row, kind, settings) for row in rows]


def check_row(row: Row, kind: Kind, settings: BuildSettings) -> tuple[Row, str | None]:
    """The row with its text cleaned and its picture converted, and the reason why it is bad, or None."""
    if row.problem:
        return row, row.problem
    row = dataclasses.replace(row, text=clean(row.text))
    if not (row.question and row.answer if kind == "vqa" else row.text):
        return row, "empty text"
    if len(row.text) > settings.passage_chars:
        return row, "text too long"
    if kind == "labelled_text" and not row.answer:
        return row, "no label"
    if kind in ("text", "labelled_text"):
        return row, None
    if row.image is None:
        return row, "missing image"
    try:
        return dataclasses.replace(row, image=encode(row.image, settings.image_size)), None
    except BadPicture as problem:
        return row, str(problem)
