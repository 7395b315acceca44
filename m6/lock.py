"""Locks of folders: each folder has at most one writing process.

The lock is a POSIX record lock (``fcntl``): the kernel frees it at every kind of exit of the process, and the worker
processes of a trainer do not hold it. Between nodes it works if the file system shares such locks: NFS 4, NFS 3 with
its lock daemon, GPFS, and Lustre mounted with ``flock``. If a file system shares them only inside of a node, such as
Lustre with ``localflock``, the lock protects against processes of the same node. Without any locks the owner gets a
warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from m6.errors import StorageError
from m6.files import naming, parse_object, sync, sync_folder

_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
_MAX_OWNER_BYTES = 4096
_POLL_S = 1.0


class FolderInUse(StorageError):
    """Another process writes the folder. It may have ended before the next attempt."""


class FolderLock:
    """The right to write a folder.

    Args:
        file: the lock file, in the folder or next to it; it is removed with the release of the lock.
        folder: the protected folder, for messages.
    """

    def __init__(self, file: Path, folder: Path) -> None:
        self._file, self._folder = file, folder
        self._descriptor: int | None = None

    def acquire(self, patience_s: float = 0.0) -> None:
        """Takes the lock, or says who has it.

        Args:
            patience_s: how long to wait for another owner, in seconds.

        Raises:
            FolderInUse: another process holds the lock.
            StorageError: the lock file cannot be written.
        """
        end = time.monotonic() + patience_s
        while True:
            try:
                return self._acquire_now()
            except FolderInUse:
                if time.monotonic() >= end:
                    raise
            time.sleep(_POLL_S)

    def _acquire_now(self) -> None:
        descriptor = self._open()
        while not _is_at(descriptor, self._file):  # its owner removed it after we opened it
            os.close(descriptor)
            descriptor = self._open()
        owner = {"pid": os.getpid(), "host": platform.node(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self._descriptor = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, (json.dumps(owner) + "\n").encode())
        except OSError as error:
            self.release()
            raise StorageError(f"{self._file} cannot be written: {error.strerror}") from None

    def _open(self) -> int:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise StorageError(f"{self._file} cannot be written: {error.strerror}") from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD_BY_ANOTHER:
                holder = _describe(os.read(descriptor, _MAX_OWNER_BYTES))
                os.close(descriptor)
                raise FolderInUse(
                    f"{self._folder} is being written by {holder}; wait until it has ended, or choose another folder"
                ) from None
            print(
                f"warning: {self._file}: this file system has no locks ({error.strerror}): start no second process in "
                f"{self._folder}",
                file=sys.stderr,
            )
        return descriptor

    def release(self) -> None:
        """Gives the lock back; does nothing if it is not held."""
        if self._descriptor is not None:
            # Removed while still locked: another process with the old file open notices it and opens the new file.
            self._file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


@contextlib.contextmanager
def new_folder(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yields a temporary folder; on success it is synced and renamed to ``path``, after an exception it is removed.

    A killed process leaves ``NAME.partial-PID``, or, between two renames, the old folder as ``NAME.replaced-PID``. The
    next writer of ``path`` removes the first and renames the second back.

    Args:
        path: a folder to make. At the end it must be missing or empty.
        replaces: whether ``path`` may be an older folder. It then stays until the new one is on the disk.

    Raises:
        FolderInUse: another process writes ``path``.
    """
    partial, replaced = (path.with_name(f"{path.name}.{state}-{os.getpid()}") for state in ("partial", "replaced"))
    with FolderLock(path.with_name(f"{path.name}.lock"), path):
        if not path.exists():
            for left in _left_behind(path, "replaced"):
                left.rename(path)
                break
        for left in [*_left_behind(path, "partial"), *_left_behind(path, "replaced")]:
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        try:
            with naming(path):
                yield partial
                sync_folder(partial)
                if replaces and path.exists():
                    path.rename(replaced)
                os.replace(partial, path)
                sync(path.parent)
        finally:
            if replaced.exists() and not path.exists():
                replaced.rename(path)
            for folder in (partial, replaced):
                shutil.rmtree(folder, ignore_errors=True)


def _left_behind(path: Path, state: str) -> list[Path]:
    """Folders next to ``path``, left by killed processes."""
    found = path.parent.glob(f"{glob.escape(path.name)}.{state}-*")
    return [folder for folder in found if folder.name.rpartition("-")[2].isdigit()]


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _describe(content: bytes) -> str:
    try:
        owner = parse_object(content)
        return f"process {owner['pid']} on {owner['host']} since {owner['time']}"
    except (ValueError, KeyError, TypeError):
        return "another process, which has not yet said its name"
