"""Checks the shards of a data folder against the manifest: sizes, and checksums once per machine.

After a successful check, a record is written to the user's cache folder. Its name depends on the shard's path, size,
modification time and inode, so a rewritten shard is checked again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from m6 import files
from m6.data.manifest import MANIFEST_NAME, Manifest, Shard
from m6.errors import UserError

_VERIFIED = b"verified\n"


def verify_shards(folder: Path, shards: Iterable[Shard]) -> None:
    """Checks shards of a data folder.

    Args:
        folder: the data folder.
        shards: the shards to check, as in the manifest.

    Raises:
        UserError: a shard is missing, or its size or SHA-256 differs from the manifest.
        StorageError: a shard cannot be read.
    """
    for shard in check_sizes(folder, shards):
        _verify_checksum(folder / shard.file, shard.sha256)


def check_sizes(folder: Path, shards: Iterable[Shard]) -> list[Shard]:
    """Checks existence and size of shards; returns the shards.

    Raises:
        UserError: a shard is missing or has another size.
        StorageError: the file system does not answer.
    """
    checked = list(shards)
    for shard in checked:
        file = folder / shard.file
        with files.reading(file):
            if not file.is_file():
                raise UserError(f"{file} is missing, but {MANIFEST_NAME} lists it")
            size = file.stat().st_size
        if size != shard.bytes:
            raise UserError(f"{file} has {size} bytes, expected {shard.bytes}: it is damaged")
    return checked


def verify_folder(manifest: Manifest, num_threads: int) -> tuple[int, list[str]]:
    """Checks all shards of a data folder, without records of earlier checks.

    Args:
        manifest: manifest of the data folder.
        num_threads: number of shards read in parallel.

    Returns:
        The number of shards, and a message for each missing or damaged one.
    """
    shards = [shard for entry in manifest.sources.values() for split in entry.splits.values() for shard in split.shards]

    def problem(shard: Shard) -> str | None:
        try:
            check_sizes(manifest.folder, [shard])
            _compare(manifest.folder / shard.file, shard.sha256)
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(num_threads) as threads:
        found = list(tqdm(threads.map(problem, shards), "shards", total=len(shards), disable=None))
    return len(shards), [text for text in found if text is not None]


def _verify_checksum(file: Path, expected: str) -> None:
    record = _open_record(file, expected)
    if record is None:
        _compare(file, expected)
        return
    try:
        if os.read(record, len(_VERIFIED)) == _VERIFIED:
            return
        # The processes of a node start together. One of them reads the shard, the others wait for its record. On a file
        # system without locks, or without space for the record, each process reads the shard.
        with contextlib.suppress(OSError):
            fcntl.lockf(record, fcntl.LOCK_EX)
        os.lseek(record, 0, os.SEEK_SET)
        if os.read(record, len(_VERIFIED)) != _VERIFIED:
            _compare(file, expected)
            with contextlib.suppress(OSError):
                os.pwrite(record, _VERIFIED, 0)
    finally:
        os.close(record)


def _open_record(file: Path, expected: str) -> int | None:
    """Opens the record of a file; None if the cache folder cannot be written or belongs to another user."""
    status = file.stat()
    identity = f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}|{expected}"
    try:
        folder = files.cache_folder() / "verified"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return None
        name = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        return os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except (OSError, UserError):
        return None


def _compare(file: Path, expected: str) -> None:
    with files.reading(file):
        found = files.sha256(file)
    if found != expected:
        raise UserError(f"{file} is damaged: its SHA-256 differs from {MANIFEST_NAME}")
