"""The files that a corpus reads, as they were when it was begun."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from m6 import files
from m6.data.manifest import Split
from m6.errors import UserError


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
        with files.reading(path):
            is_unchanged = path.exists() and _size_and_time(path) == (self.bytes, self.modified_ns)
        if not is_unchanged:
            raise UserError(f"{path} has changed since the corpus was begun")


def checked_file(path: Path, read_before: dict[str, InputFile]) -> InputFile:
    """Returns the entry of a file here; one of the same size and time as before is not read again."""
    size, modified_ns = _size_and_time(path)
    before = read_before.get(str(path))
    if before is not None and (before.bytes, before.modified_ns) == (size, modified_ns):
        return before
    return InputFile(path=str(path), bytes=size, modified_ns=modified_ns, sha256=files.sha256(path))


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
