"""Reads the documents of one part. What is damaged is a row with a problem: it never ends the reading."""

from __future__ import annotations

import gzip
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from m6.data.corpus.forms import ARCHIVES, TARS, TEXTS, files_of_set, suffix_of
from m6.data.corpus.parquet import damaged, parquet_entries
from m6.data.corpus.picture_reading import read_pictures, tar_rows
from m6.data.corpus.plan import Part, Plan, open_source, options_columns, options_of
from m6.data.corpus.recipe import CorpusRecipe, InputSettings, NamedSet
from m6.data.corpus.remote import fetch
from m6.data.corpus.web import read_archive
from m6.data.manifest import Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.documents import Documents
from m6.data.sources.folders import json_entries
from m6.data.sources.table_rows import picture_row, text_rows
from m6.errors import UserError


def read_part(recipe: CorpusRecipe, plan: Plan, part: Part, fetched: Path) -> Iterator[Row]:
    """Yields the documents of a part in an order that never changes, longer ones cut to ``document_chars``.

    The id of a document has the name of its file.

    Args:
        recipe: the recipe.
        plan: its plan.
        part: what is read.
        fetched: a folder of this part alone, which holds its remote files while they are read.

    Raises:
        UserError: a file or a whole source has changed since the plan, such as a data set of the Hub with a newer
            commit.
        StorageError: a file cannot be read, and may be whole.
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
    """The input's folder and the files of the part on this machine; remote ones are fetched, and removed afterwards."""
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
    """Yields the texts of a named set, as ``read_part`` does; UserError if it has no files."""
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
