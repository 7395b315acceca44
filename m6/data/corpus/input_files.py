"""The files that a corpus reads, as they were when it was begun."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from m6 import files
from m6.data.manifest import Split
from m6.errors import UserError

_AT_ONCE = 8  # files that are read for their checksums


class InputFile(BaseModel):
    """A file that is read.

    Attributes:
        path: of a file here, or a URL.
        modified_ns: a file here of this size and time is taken for unchanged.
        sha256: of the contents; of a URL, of what its store says of it.
        name: of a URL, below the input's folder; None for a file here.
        split: that it, or its folder at the top, is named after.
    """

    model_config = ConfigDict(extra="forbid")

    path: str
    bytes: int
    modified_ns: int
    sha256: str
    name: str | None = None
    split: Split | None = None

    def check_unchanged(self) -> None:
        """Checks that a file here is the one of the plan; those of URLs are checked when they are copied.

        Raises:
            UserError: it is gone, or has another size or time.
            StorageError: the file system does not tell.
        """
        if self.name is not None:
            return
        path = Path(self.path)
        found = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), files.reading(path):
            found = _size_and_time(path)
        if found != (self.bytes, self.modified_ns):
            raise UserError(f"{path} has changed since the corpus was begun")


class Checksums:
    """Makes the entries of files here, several at a time. A file of the same size and time as before is not read again.

    Args:
        known: entries of before.
        record: a JSON Lines file that each new entry is appended to, and whose entries are known: those of a launch
            that was interrupted. None: there is none.
    """

    def __init__(self, known: Iterable[InputFile] = (), record: Path | None = None) -> None:
        self._record, self._lock = record, threading.Lock()
        lines = record.read_bytes().splitlines() if record is not None and record.exists() else []
        self._known = {file.path: file for file in known}
        for line in lines:
            with contextlib.suppress(ValidationError):  # a crash cut a line off: its file is read again
                file = InputFile.model_validate_json(line)
                self._known[file.path] = file

    def entries(self, paths: list[Path]) -> list[InputFile]:
        """Returns the entries of files in their order."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(self._entry, paths))

    def _entry(self, path: Path) -> InputFile:
        size, modified_ns = _size_and_time(path)
        known = self._known.get(str(path))
        if known is not None and (known.bytes, known.modified_ns) == (size, modified_ns):
            return known
        entry = InputFile(path=str(path), bytes=size, modified_ns=modified_ns, sha256=files.sha256(path))
        if self._record is not None:
            with self._lock:
                self._record.parent.mkdir(parents=True, exist_ok=True)
                with self._record.open("a", encoding="utf-8") as record:
                    record.write(entry.model_dump_json() + "\n")
        return entry


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
