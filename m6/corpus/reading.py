"""Reads the documents of one part: tables, texts, tar files of images, and web archives.

A damaged document becomes a row with a problem; reading goes on. Web archives (ISO 28500) are WARC files with pages,
whose main text is extracted, and WET files with texts. The limit of a page is its size, not the time to parse it, so
the result is the same on any machine.
"""

from __future__ import annotations

import errno
import gzip
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from m6 import files
from m6.corpus.inputs import fetch
from m6.corpus.plan import (
    ARCHIVES,
    TARS,
    TEXTS,
    Part,
    Plan,
    files_of_set,
    open_source,
    options_columns,
    options_of,
    suffix_of,
)
from m6.corpus.recipe import CorpusRecipe, InputSettings, NamedSet
from m6.data.manifest import Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.folders import json_entries
from m6.data.sources.local import MAX_PICTURE_BYTES, PICTURE_SUFFIXES, TOO_LARGE
from m6.data.sources.rows import Columnar, Documents, picture_row, text_rows
from m6.data.sources.webdataset import WebDataset
from m6.errors import UserError
from m6.files import cache_folder, reading

if TYPE_CHECKING:
    from warcio.recordloader import ArcWarcRecord


def parquet_entries(path: Path, columns: list[str]) -> Iterator[dict[str, Any] | str]:
    """Yields each row's values of some columns, or the reason if a row or the rest of the file is unreadable.

    Raises:
        StorageError: as ``damaged``.
    """
    import pyarrow as pa

    try:
        file = Columnar.open(path)
        if missing := [column for column in columns if column not in file.columns]:
            yield f'no column "{missing[0]}"'
            return
        yield from file.entries(columns)
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        yield damaged(path, error)


def damaged(path: Path, error: Exception) -> str:
    """Returns the reason for an unreadable rest of a file: the kind of the error.

    Raises:
        StorageError: storage failed, for example a lost file server. The file may be whole, so its rest must not be
            skipped.
    """
    # A damaged tar file may lead to an invalid seek offset: EINVAL.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        with files.reading(path):
            raise error
    # The kind only: a message contains offsets, so each would be counted as another reason.
    return f"the file is damaged ({type(error).__name__})"


def tar_rows(path: Path, folder: Path, name: str, split: Split | None, options: SourceOptions) -> Iterator[Row]:
    """Yields the rows of a WebDataset tar file.

    Args:
        path: the file.
        folder: the input's folder.
        name: name of the input, the prefix of the ids.
        split: the split of the whole file, if it has one.
        options: reading options, with the columns of the .json members.

    Raises:
        StorageError: storage failed; the file may be whole.
    """
    identity = f"{name}/{path.relative_to(folder).as_posix()}"
    try:
        yield from WebDataset(name, folder, [path], options, {path: split}).rows_of(path)
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError) as error:
        yield Row(identity, None, problem=damaged(path, error))


def read_pictures(path: Path, name: str, image_column: str) -> Iterator[Row]:
    """Yields the images of one file of a named set, with or without captions.

    Args:
        path: an image, a tar file or a Parquet file.
        name: name of the set, the prefix of the ids.
        image_column: column of images in a Parquet file.
    """
    identity = f"{name}/{path.name}"
    if path.suffix.lower() in PICTURE_SUFFIXES:
        with reading(path):
            is_large = path.stat().st_size > MAX_PICTURE_BYTES
            image = None if is_large else path.read_bytes()
        yield Row(identity, None, image=image, problem=TOO_LARGE if is_large else None)
    elif path.suffix.lower() == ".tar":
        options = SourceOptions(cache=cache_folder(), licence="private")
        for row in tar_rows(path, path.parent, name, None, options):
            # Captions are not needed here, so a problem with one does not matter.
            yield row if row.image is None else replace(row, problem=None)
    else:
        for number, entry in enumerate(parquet_entries(path, [image_column]), start=1):
            if isinstance(entry, str):
                yield Row(f"{identity}:{number}", None, problem=entry)
                continue
            image = entry[image_column]
            image = image.get("bytes") if isinstance(image, dict) else image
            if image is not None:  # text rows of a data folder have no image
                yield Row(f"{identity}:{number}", None, image=image)


MAX_RECORD_BYTES = 4 << 20
_CHUNK = 1 << 16
_PAGES = ("text/html", "application/xhtml+xml")


def read_archive(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yields the text of each page of an archive, or "" and the reason if a page has none.

    Other records, such as requests and images, are skipped. A file cut off inside a record's header looks complete.

    Args:
        path: a WARC or WET file; records may be compressed by gzip one by one.

    Raises:
        OSError, EOFError, ValueError, zlib.error: the rest of the file cannot be read.
    """
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    with path.open("rb") as file:
        records = ArchiveIterator(file)
        try:
            for record in records:
                if (kind := _kind(record)) is None:
                    continue
                found = _text(record, kind)
                while record.raw_stream.read(_CHUNK):  # skips the rest of the record
                    pass
                if getattr(record.raw_stream, "limit", 0):
                    raise ValueError("the last record is cut off")
                yield found
        except ArchiveLoadFailed as error:
            raise ValueError(str(error)) from None


def _kind(record: ArcWarcRecord) -> str | None:
    """Returns "text" for a text record of a WET file, "page" for a page of a WARC file, None for other records."""
    if record.rec_type == "conversion":
        return "text"
    if record.rec_type != "response" or record.http_headers is None:
        return None
    # The type detected by the crawler; if missing, the type declared by the server.
    declared = record.rec_headers.get_header("WARC-Identified-Payload-Type")
    declared = declared or record.http_headers.get_header("Content-Type", "")
    if record.http_headers.get_statuscode() not in ("", "200"):
        return None
    return "page" if declared.partition(";")[0].strip().lower() in _PAGES else None


def _text(record: ArcWarcRecord, kind: str) -> tuple[str, str | None]:
    # Reads one byte above the limit: a page may unpack to gigabytes.
    content = record.content_stream().read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        return "", "page too large"
    if kind == "text":
        try:
            return content.decode("utf-8"), None
        except UnicodeDecodeError:
            return "", "not UTF-8"
    from trafilatura import extract

    # Without deduplication against earlier pages: a text must not depend on the other pages of a task.
    text = extract(content, favor_precision=True, include_comments=False, deduplicate=False)
    return text or "", None if text else "no main text"


def read_part(recipe: CorpusRecipe, plan: Plan, part: Part, fetched: Path) -> Iterator[Row]:
    """Yields the documents of a part in a fixed order. Long documents are cut to ``document_chars``.

    The id of a document contains the name of its file.

    Args:
        recipe: the recipe.
        plan: its plan.
        part: the part to read.
        fetched: a folder used only by this part, for its remote files while they are read.

    Raises:
        UserError: a file or a whole source has changed since the plan, for example a data set of the Hub has a newer
            commit.
        StorageError: storage failed; a file may be whole.
    """
    if part.unreadable is None:
        for file in plan.files_of(part):
            file.check_unchanged()
    if part.input in plan.sets:
        named = next(each for each in recipe.decontamination.picture_sets if each.name == part.input)
        for file in plan.files_of(part):
            yield from read_pictures(Path(file.path), part.input, named.image_column)
        return
    settings = recipe.input(part.input)
    if not part.files:
        source = open_source(settings, recipe)
        if source.origin() != plan.inputs[part.input].origin:
            raise UserError(
                f"{settings.source} has changed since the corpus was begun; remove its work folder to begin anew"
            )
        yield from source.rows()
        return
    with _here(settings, plan, part, fetched) as (folder, paths):
        splits = {path: file.split for path, file in zip(paths, plan.files_of(part), strict=True)}
        yield from _rows_of(folder, splits, recipe, settings, part)


@contextmanager
def _here(settings: InputSettings, plan: Plan, part: Part, fetched: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yields the input's folder and the part's local files. Remote files are fetched, and removed afterwards."""
    files = plan.files_of(part)
    remote = [(file, fetched / file.name) for file in files if file.name is not None]
    if not remote:
        root = Path(settings.source)
        yield (root if root.is_dir() else root.parent), [Path(file.path) for file in files]
        return
    try:
        if part.unreadable is None:
            for file, path in remote:
                fetch(file.path, file.sha256, path)
        yield fetched, [path for _, path in remote]
    finally:
        shutil.rmtree(fetched, ignore_errors=True)


def _rows_of(
    folder: Path,
    splits: Mapping[Path, Split | None],
    recipe: CorpusRecipe,
    settings: InputSettings,
    part: Part,
) -> Iterator[Row]:
    names = [f"{part.input}/{path.relative_to(folder).as_posix()}" for path in splits]
    if part.unreadable is not None:
        yield from (Row(name, None, problem=part.unreadable) for name in names)
        return
    options = options_of(settings, recipe)
    if suffix_of(next(iter(splits))) in TEXTS:
        yield from Documents(part.input, folder, list(splits), options, splits).rows()
        return
    for (path, split), name in zip(splits.items(), names, strict=True):
        if suffix_of(path) in TARS:
            yield from tar_rows(path, folder, part.input, split, options)
        else:
            yield from _table_rows(path, name, split, settings, options)


def _table_rows(
    path: Path, name: str, split: Split | None, settings: InputSettings, options: SourceOptions
) -> Iterator[Row]:
    columns, suffix = list(options_columns(settings).values()), suffix_of(path)
    read: Iterator[tuple[int, dict[str, Any] | str]]
    if suffix in ARCHIVES:
        read = enumerate(_pages(path, settings), start=1)
    else:
        read = enumerate(parquet_entries(path, columns), start=1) if suffix == ".parquet" else _json_lines(path)
    for number, entry in read:
        identity = f"{name}:{number}"
        if isinstance(entry, str):
            yield Row(identity, None, problem=entry)
        elif settings.image_column is not None:
            yield picture_row(entry, settings.image_column, identity, split, path.parent, options)
        else:
            yield from text_rows(entry, identity, split, options)


def _pages(path: Path, settings: InputSettings) -> Iterator[dict[str, Any] | str]:
    try:
        for text, problem in read_archive(path):
            yield problem or {settings.text_column: text}
    except (OSError, EOFError, zlib.error, ValueError) as error:
        yield damaged(path, error)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    number = 0
    try:
        with path.open("rb") as file:
            lines = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.suffix.lower() == ".gz" else file
            for number, entry in json_entries(lines):
                yield number, entry
    except (OSError, EOFError, zlib.error, ValueError) as error:
        yield number + 1, damaged(path, error)


def read_set(named: NamedSet) -> Iterator[Row]:
    """Yields the texts of a named set like ``read_part``; UserError if the set has no files."""
    settings = InputSettings(source=str(named.path), name=named.name, licence="private", text_column=named.text_column)
    recipe = CorpusRecipe(out=Path(), inputs=[settings])
    options = options_of(settings, recipe)
    folder = named.path if named.path.is_dir() else named.path.parent
    for file in files_of_set(named):
        if suffix_of(file) in TEXTS:
            yield from Documents(named.name, folder, [file], options).rows()
        else:
            name = f"{named.name}/{file.relative_to(folder).as_posix()}"
            yield from _table_rows(file, name, None, settings, options)
