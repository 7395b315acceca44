"""Atomic file writes: a reader sees the old file or the new one, never a part."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from m6.errors import StorageError, UserError

_MISSING = (FileNotFoundError, NotADirectoryError)
# A string (its // is no comment); a comment to the end of the line; a comment of several lines.
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def without_comments(text: str) -> str:
    """Replaces ``//`` and ``/* */`` comments of a JSON text by blanks, so parse errors keep their line and column."""
    return _STRING_OR_COMMENT.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds ``path`` to an OSError without a file name, such as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError: the file server may be lost and ``path`` intact, so a later read may work.

    Two kinds of OSError stay: for a missing file, and without an errno, since pyarrow raises these for damaged files.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, _MISSING):
            raise
        raise StorageError(f"{path} cannot be read: {os.strerror(error.errno)}") from None


def check_readable(*paths: Path) -> None:
    """Reads files of at most some MB, before a library reads them and takes a lost file server for a damaged file.

    Missing files are left to the library.

    Raises:
        StorageError: a file cannot be read.
    """
    for path in paths:
        with contextlib.suppress(*_MISSING), reading(path):
            path.read_bytes()


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a text file in UTF-8, with or without a byte order mark.

    Raises:
        UserError: the file cannot be read, or has another encoding.
    """
    try:
        # Not splitlines: it also cuts at characters inside of a line, such as U+2028.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable text file: {error}") from None


def read_note(path: Path) -> str:
    """Returns the stripped text of a short file. A person may have written it, so any encoding is accepted."""
    return path.read_bytes().decode("utf-8", "backslashreplace").strip()


def parse_object(content: bytes | str) -> dict[str, Any]:
    """Parses a JSON object from one of this project's own files.

    Raises:
        ValueError: the content is damaged: no JSON, or no object.
    """
    try:
        value = json.loads(content)
    except RecursionError:  # brackets without end
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


@contextlib.contextmanager
def atomic_path(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yields a temporary path in the folder of ``path``; on success it is synced and renamed to ``path``.

    After an exception the temporary file is removed and ``path`` is unchanged.

    Args:
        path: the file to write.
        mode: permissions of the file before the umask is applied.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # rename(2) is atomic only within one file system, so the temporary file is made in the same folder.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # The kernel applies the umask to the mode. A process can only read its umask by setting it, and two threads doing
    # this at once may leave it at 0.
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL, mode)
    permissions = stat.S_IMODE(os.fstat(descriptor).st_mode)
    os.close(descriptor)
    try:
        with naming(path):
            yield temporary
            os.chmod(temporary, permissions)  # safetensors replaces the file, and only its owner may read the new one
            # The content must be on the disk before the rename, or a crash could leave an empty file under the name.
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def why_unwritable(folder: Path) -> str | None:
    """Returns why no file can be made in a folder, existing or not; None if one can."""
    # The first existing parent decides whether it can be created.
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is read-only"


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flushes every file and folder below ``folder``, and its entries, to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def copy_folder(source: Path, target: Path, ignored: Collection[str] = ()) -> None:
    """Copies a folder without the files and folders of the names in ``ignored``.

    Raises:
        StorageError: ``target`` cannot be written, such as on a full disk.
    """
    try:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*ignored))
    except shutil.Error as error:  # a list of (source, target, reason); one is enough
        _, path, reason = error.args[0][0]
        raise StorageError(f"{path} cannot be written: {reason}") from None


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a UTF-8 text file atomically; ``mode`` as in ``atomic_path``."""
    with atomic_path(path, mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    """Writes a value as indented JSON with a final line break, atomically; ``mode`` as in ``atomic_path``."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", mode)


def cut_lines_after(path: Path, step: int) -> list[int]:
    """Removes the lines of later steps and an incomplete last line from a JSON Lines file.

    Other lines are damaged if they are no JSON objects with a step. They are moved to ``NAME.damaged`` in the same
    folder. A missing file stays missing.

    Args:
        path: the file.
        step: the last step to keep.

    Returns:
        The numbers of the damaged lines, from 1.
    """
    if not path.exists():
        return []
    kept: list[bytes] = []
    damaged: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            if parse_object(line)["step"] <= step:
                kept.append(line if line.endswith(b"\n") else line + b"\n")
        except (ValueError, KeyError, TypeError):
            if line.endswith(b"\n"):  # a line cut off by a crash has no line break and is dropped
                damaged[number] = line
    if damaged:
        with path.with_name(f"{path.name}.damaged").open("ab") as file:
            file.writelines(damaged.values())
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"".join(kept))
    return list(damaged)


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal. The file is read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Returns the cache folder of this project: ``$XDG_CACHE_HOME/m6-recipes`` or ``~/.cache/m6-recipes``.

    A user may have neither HOME nor an entry in passwd, for example in containers with arbitrary user ids. The cache is
    then a folder in the temporary folder, writable by this user only.

    Raises:
        UserError: the folder in the temporary folder belongs to another user.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "m6-recipes"
    try:
        return Path.home() / ".cache" / "m6-recipes"
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"m6-recipes-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UserError(f"{folder} is a link, or others can write it: remove it, or name a folder in XDG_CACHE_HOME")
    return folder
