"""Reads the rows of a Parquet file one by one. What is damaged is the reason why."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m6 import files
from m6.data.sources.columnar import Columnar
from m6.errors import UserError


def parquet_entries(path: Path, columns: list[str]) -> Iterator[dict[str, Any] | str]:
    """Yields the values of some columns of each row, or why a row or the rest of the file cannot be read.

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
    """Returns why the rest of a file cannot be read: the kind of an error.

    Raises:
        StorageError: the error is that of a lost file server, say: the file may be whole, and its rest is not to be
            left out.
    """
    # A damaged tar file may name a place that no file has, which is EINVAL.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        with files.reading(path):
            raise error
    # Not its message: a message has offsets, and each would be a reason of its own.
    return f"the file is damaged ({type(error).__name__})"
