"""Builds a data folder from sources: checks and splits their rows, writes Parquet shards and a manifest."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import multiprocessing
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from m6.data.manifest import MANIFEST_NAME, SKIPPED_NAME, Manifest, Origin, SourceEntry, SourceKind, Split, SplitEntry
from m6.data.overlap import count_groups
from m6.data.shards import SplitWriters, describe_source
from m6.data.sources.base import Row, Source, count_unread
from m6.data.sources.pictures import BadPicture, encode
from m6.data.sources.text import clean
from m6.data.splitting import Grouping, SplitRules, split_rows
from m6.data.workers import naming_the_start
from m6.errors import UserError, nearest
from m6.lock import new_folder

_LISTED_UNREAD = 8  # kinds of members named in a message
NAMED_SKIPS = 3  # rows of each reason named in a message
CHUNK_ROWS = 32  # rows sent to a worker process at once, to amortise the cost of pickling
# Unicode normalisation sorts combining marks in quadratic time: 100,000 in a row take 8 s. Real texts have few.
_MAX_MARKS = 1000
_NO_LETTERS = re.compile(r"[^\w\s]+")


def check_row(row: Row, kind: SourceKind, *, max_chars: int, image_size: int = 64) -> tuple[Row, str | None]:
    """Cleans the text of a row and converts its image.

    Args:
        row: a row of a source.
        kind: kind of the source.
        max_chars: longest text in characters.
        image_size: longest side of the converted image in pixels.

    Returns:
        The converted row, and the reason if it is unusable; else None.
    """
    # File names may contain bytes outside UTF-8. Neither Parquet nor JSON can write them.
    group = None if row.group is None else _printable(row.group)
    row = dataclasses.replace(row, id=_printable(row.id), group=group)
    if row.problem:
        return row, row.problem
    row = dataclasses.replace(
        row,
        text=clean(row.text),
        question=_clean_or_none(row.question),
        answer=_clean_or_none(row.answer),
        context=_clean_or_none(row.context),
    )
    needed = {"no question": row.question, "no answer": row.answer} if kind == "vqa" else {"empty text": row.text}
    for problem, text in needed.items():
        if not text:
            return row, problem
    if len(row.text) > max_chars:
        return row, "text too long"
    if _has_many_marks(row.text):
        return row, f"more than {_MAX_MARKS} combining marks in a row"
    if kind == "labelled_text" and not row.answer:
        return row, "no label"
    if kind in ("text", "labelled_text"):
        return row, None
    if row.image is None:
        return row, "missing image"
    try:
        return dataclasses.replace(row, image=encode(row.image, image_size)), None
    except BadPicture as problem:
        return row, str(problem)


def _has_many_marks(text: str) -> bool:
    runs = (run for run in _NO_LETTERS.findall(text) if len(run) > _MAX_MARKS) if len(text) > _MAX_MARKS else ()
    return any(sum(unicodedata.combining(char) > 0 for char in run) > _MAX_MARKS for run in runs)


def _clean_or_none(text: str | None) -> str | None:
    return None if text is None else clean(text)


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """Settings of a data folder's contents.

    Attributes:
        image_size: longest side of a stored image in pixels.
        passage_chars: longest text in characters.
        limit: maximum number of rows of each source; None for no limit.
        limits: maximum number of rows by source name; takes precedence over ``limit``.
        validation_share: share of the groups in the validation split.
        test_share: share of the groups in the test split.
        max_bad_share: largest accepted share of bad rows of a source; above it the build fails.

    Raises:
        UserError: a number is out of range, or the shares leave no training data.
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
    """Builds a data folder.

    The folder is written under a temporary name and renamed when it is complete. The same sources and settings give
    the same bytes for any number of workers.

    Args:
        sources: the sources, each with a different name.
        out: the folder to make.
        settings: sizes, limits and splits.
        workers: number of processes to convert images.

    Returns:
        The manifest, and whether the folder was built: False if ``out`` held the same data set already.

    Raises:
        UserError: ``out`` holds something else, a source has no usable row, or more than ``max_bad_share`` of the
            rows of a source are bad.
    """
    repeated = [name for name, n in collections.Counter(source.name for source in sources).items() if n > 1]
    if repeated:
        raise UserError(f'two sources are called "{repeated[0]}"; name one with CALLED=PATH')
    for name in settings.limits:
        if name not in (names := [source.name for source in sources]):
            raise UserError(f'a limit for "{name}", which is not among the sources{nearest(name, names)}')
    out = out.resolve()
    origins = {source.name: source.origin() for source in sources}
    # max_bad_share is excluded: it decides only whether the build fails.
    recipe = {name: value for name, value in asdict(settings).items() if name != "max_bad_share" and value != {}}
    if (existing := _existing(out, recipe, origins)) is not None:
        return existing, False
    with new_folder(out) as partial:
        entries: dict[str, SourceEntry] = {}
        refused = out.with_name(f"{out.name}.{SKIPPED_NAME}")
        with (partial / SKIPPED_NAME).open("w", encoding="utf-8") as skipped:
            for source in sources:
                try:
                    entries[source.name] = _build_source(
                        source, origins[source.name], partial, settings, workers, skipped
                    )
                except _TooManyBadRows as error:
                    skipped.flush()
                    shutil.copyfile(partial / SKIPPED_NAME, refused)  # the partial folder is removed
                    raise UserError(f"{error}; nothing was written but the list of skipped rows, {refused}") from None
        refused.unlink(missing_ok=True)
        Manifest(recipe=recipe, sources=entries).save(partial)
    return Manifest.load(out), True


class _TooManyBadRows(UserError):
    """A source has too many bad rows."""


def _existing(out: Path, recipe: dict[str, Any], origins: dict[str, list[Origin]]) -> Manifest | None:
    """Returns the manifest of ``out`` if it is this data set, None if it is empty; else raises UserError."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    existing = Manifest.load(out) if (out / MANIFEST_NAME).is_file() else None
    if existing is not None and _is_same_data(existing, recipe, origins):
        return existing
    raise UserError(f"{out} is not empty and is not this data set; choose another folder or remove it")


def _is_same_data(manifest: Manifest, recipe: dict[str, Any], origins: dict[str, list[Origin]]) -> bool:
    return manifest.recipe == recipe and {n: e.origin for n, e in manifest.sources.items()} == origins


def _build_source(
    source: Source, origin: list[Origin], folder: Path, settings: BuildSettings, workers: int, skip_list: IO[str]
) -> SourceEntry:
    skipped: collections.Counter[str] = collections.Counter()
    examples: dict[str, list[str]] = collections.defaultdict(list)
    limit = settings.limits.get(source.name, settings.limit)
    stream = tqdm(
        itertools.islice(source.rows(), limit),
        desc=source.name,
        unit=" rows",
        total=limit,
        disable=None,  # no bar unless stderr is a terminal
    )

    cut = 0
    unread: collections.Counter[str] = collections.Counter()

    def usable_rows() -> Iterator[Row]:
        nonlocal cut
        for row, problem in _checked(stream, source.kind, settings, workers):
            count_unread(unread, row.unread)
            if not problem:
                cut += row.cut
                yield row
                continue
            skipped[problem] += 1
            if len(examples[problem]) < NAMED_SKIPS:
                examples[problem].append(row.id)
            entry = {"source": source.name, "id": row.id, "reason": problem}
            skip_list.write(json.dumps(entry, ensure_ascii=False) + "\n")

    rules = SplitRules(settings.validation_share, settings.test_share, source.own_splits)
    grouping = Grouping()
    spool = folder / "waiting"
    with SplitWriters(folder, source.name) as writers:
        for row, split in split_rows(usable_rows(), source.name, spool, rules, grouping):
            writers.write(row, split)
    shutil.rmtree(spool, ignore_errors=True)
    usable = sum(entry.rows for entry in writers.splits.values())
    reasons = "; ".join(
        f"{reason}: {count}, such as {', '.join(examples[reason])}" for reason, count in skipped.most_common()
    )
    if not usable:
        raise UserError(f'source "{source.name}" has no usable row ({reasons or "it is empty"}); nothing was written')
    rows = usable + skipped.total()
    if skipped.total() / rows > settings.max_bad_share:
        enough = math.ceil(skipped.total() / rows * 1000) / 1000
        raise _TooManyBadRows(
            f'source "{source.name}": {skipped.total()} of {rows} rows are bad ({reasons}), more than --max-bad-share '
            f"{settings.max_bad_share:g}; mend them, or build without them with --max-bad-share {enough:g}"
        )
    if skipped:
        _warn(f"{source.name}: skipped {skipped.total()} rows ({reasons})")
    if unread:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in unread.most_common(_LISTED_UNREAD))
        more = f" and {len(unread) - _LISTED_UNREAD} others" if len(unread) > _LISTED_UNREAD else ""
        _warn(f"{source.name}: {unread.total()} members of its samples are not read ({kinds}{more})")
    if cut:
        _warn(
            f"{source.name}: {cut:,} labelled texts or contexts were cut to {settings.passage_chars} characters "
            "(--passage-chars)"
        )
    contents = writers.contents
    groups = count_groups(contents.values())
    entry = describe_source(source.kind, source.own_splits, origin, writers.splits, contents, groups, skipped, unread)
    _warn_of_splits(source, entry.splits, grouping, settings)
    return entry


def _warn_of_splits(
    source: Source, splits: dict[Split, SplitEntry], grouping: Grouping, settings: BuildSettings
) -> None:
    """Warns of empty splits, grouped rows, and splits with data in common with training."""
    name, own = source.name, source.own_splits
    if grouping.rows:
        _warn(f"{name}: {grouping.rows} pictures in {grouping.groups} groups of equal captions or pictures")
    for split, entry in splits.items():
        if entry.shared is not None and entry.shared.rows:
            _warn(
                f"{name}: {entry.shared.rows:,} of {entry.rows:,} rows of the {split} split share something with the "
                f"training split ({entry.shared}); the manifest records it"
            )
    if not splits["train"].rows:
        _warn(
            f"{name}: no row is in the training split; a run reads, and validates on, only sources that have such "
            "rows. Files that belong together are one source: a folder with, say, train.jsonl and validation.jsonl"
        )
    shares = {"validation": settings.validation_share, "test": settings.test_share}
    for split in ("validation", "test"):
        if not splits[split].rows and shares[split]:
            # A source with its own splits gives no further test rows; it gives validation rows only if it has no
            # validation split.
            if own if split == "test" else split in own:
                advice = f"its own splits ({', '.join(sorted(own))}) are kept as they are"
            else:
                advice = f"a larger --{split}-share holds out more"
            _warn(f"{name}: no row is in the {split} split; {advice}")


def _warn(message: str) -> None:
    print(message, file=sys.stderr)


def _checked(
    rows: Iterable[Row], kind: SourceKind, settings: BuildSettings, workers: int
) -> Iterator[tuple[Row, str | None]]:
    """Checks rows and keeps their order. Rows with images are checked by worker processes.

    At most ``4 * workers`` chunks are in flight, to bound the memory for a source of any length.
    """
    # Checking a text costs less than sending it to another process.
    if workers == 1 or kind in ("text", "labelled_text"):
        yield from _check_all(rows, kind, settings)
        return
    source = iter(rows)
    waiting: collections.deque[Future[list[tuple[Row, str | None]]]] = collections.deque()
    # Spawn, because a fork of a process with threads (pyarrow has some) may deadlock.
    with naming_the_start("--workers", workers, 1):
        processes = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    with processes as pool:
        try:
            while chunk := list(itertools.islice(source, CHUNK_ROWS)):
                with naming_the_start("--workers", workers, 1):
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


def _check_chunk(rows: list[Row], kind: SourceKind, settings: BuildSettings) -> list[tuple[Row, str | None]]:
    return list(_check_all(rows, kind, settings))


def _check_all(rows: Iterable[Row], kind: SourceKind, settings: BuildSettings) -> Iterator[tuple[Row, str | None]]:
    return (check_row(row, kind, max_chars=settings.passage_chars, image_size=settings.image_size) for row in rows)
