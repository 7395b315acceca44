"""Checks the shards of a data folder against the manifest: sizes always, checksums once per machine.

A checksum that was right is noted in the user's cache folder, under a name that depends on the file's path, size, time
of change and inode. A file that is written again is therefore checked again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from m6 import files
from m6.data.manifest import MANIFEST_NAME, Shard
from m6.errors import UserError

_VERIFIED = b"verified\n"


def verify_shards(folder: Path, shards: Iterable[Shard]) -> None:
    """Checks shards of the data folder ``folder``.

    Raises:
        UserError: a shard is missing, or its size or SHA-256 differs from the manifest's.
    """
    for shard in shards:
        file = folder / shard.file
        if not file.is_file():
            raise UserError(f"{file} is missing, but {MANIFEST_NAME} lists it")
        if file.stat().st_size != shard.bytes:
            raise UserError(f"{file} has {file.stat().st_size} bytes, expected {shard.bytes}: it is damaged")
        _verify_checksum(file, shard.sha256)


def _verify_checksum(file: Path, expected: str) -> None:
    note = _note(file, expected)
    if note is None:
        _compare(file, expected)
        return
    try:
        if os.read(note, len(_VERIFIED)) == _VERIFIED:
            return
        # The processes of a node start together: one of them reads the file, the others wait for its note.
        fcntl.lockf(note, fcntl.LOCK_EX)
        os.lseek(note, 0, os.SEEK_SET)
        if os.read(note, len(_VERIFIED)) != _VERIFIED:
            _compare(file, expected)
            os.pwrite(note, _VERIFIED, 0)
    finally:
        os.close(note)


def _note(file: Path, expected: str) -> int | None:
    """A descriptor of the note about a file; None where the cache cannot be written or is another user's."""
    status = file.stat()
    identity = f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}|{expected}"
    folder = files.cache_folder() / "verified"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return None
        name = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        return os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _compare(file: Path, expected: str) -> None:
    if files.sha256(file) != expected:
        raise UserError(f"{file} is damaged: its SHA-256 differs from {MANIFEST_NAME}")
