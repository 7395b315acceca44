"""Reads pictures of tar files and of named sets. What is damaged is a row with a problem."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from m6.data.corpus.parquet import damaged, parquet_entries
from m6.data.manifest import Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.local import MAX_PICTURE_BYTES, PICTURE_SUFFIXES, TOO_LARGE
from m6.data.sources.webdataset import WebDataset
from m6.files import cache_folder, reading


def tar_rows(path: Path, folder: Path, name: str, split: Split | None, options: SourceOptions) -> Iterator[Row]:
    """Yields the rows of a WebDataset tar file.

    Args:
        path: the file.
        folder: the input's folder.
        name: name of the input, with which the ids begin.
        split: the split of the whole file, if it is one.
        options: columns of its .json members.

    Raises:
        StorageError: the file cannot be read, and may be whole.
    """
    identity = f"{name}/{path.relative_to(folder).as_posix()}"
    try:
        yield from WebDataset(name, folder, [path], options, {path: split}).rows_of(path)
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError) as error:
        yield Row(identity, None, problem=damaged(path, error))


def read_pictures(path: Path, name: str, image_column: str) -> Iterator[Row]:
    """Yields the pictures of one file of a named set, with or without captions.

    Args:
        path: a picture, a tar file or a Parquet file.
        name: name of the set, with which the ids begin.
        image_column: the column of pictures of a Parquet file.
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
            # Pictures need no captions here, so what is wrong with one does not matter.
            yield row if row.image is None else replace(row, problem=None)
    else:
        for number, entry in enumerate(parquet_entries(path, [image_column]), start=1):
            if isinstance(entry, str):
                yield Row(f"{identity}:{number}", None, problem=entry)
                continue
            image = entry[image_column]
            image = image.get("bytes") if isinstance(image, dict) else image
            if image is not None:  # rows of texts in a data folder have none
                yield Row(f"{identity}:{number}", None, image=image)
