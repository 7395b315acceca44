"""Inputs that are not on this machine: listed and copied by fsspec, from object stores, web servers and the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from m6.errors import UserError, nearest


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store.

    Attributes:
        url: with the protocol.
        name: below the folder that was listed.
        bytes: size; 0 where the store does not say it.
        key: SHA-256 of what the store says of the file, such as size, time and tag.
    """

    url: str
    name: PurePosixPath
    bytes: int
    key: str

    @property
    def problem(self) -> str | None:
        """Why the file is not copied: a key of an object store may climb out of a folder."""
        return "file name climbs out of its folder" if ".." in self.name.parts or self.name.is_absolute() else None


def is_remote(source: str) -> bool:
    """Whether a source is a URL, such as ``s3://bucket/folder``."""
    return "://" in source


def list_remote(source: str) -> list[RemoteFile]:
    """All files of a URL, in the order of their names; a URL that does not end with a slash may be that of one file.

    Raises:
        UserError: the protocol is not known or not installed, or the store cannot be read.
    """
    store, root = _open(source)
    try:
        is_file = not source.endswith("/") and store.isfile(root)
        found = [store.info(root)] if is_file else list(_below(store, root))
        listed = [
            RemoteFile(
                url=store.unstrip_protocol(info["name"]),
                name=_name(info["name"], root),
                bytes=int(info.get("size") or 0),
                key=store.ukey(info["name"]),
            )
            for info in found
        ]
    except FileNotFoundError:
        listed = []
    except Exception as error:  # each store has its own kinds
        raise UserError(f"{source} cannot be listed: {type(error).__name__}: {error}") from None
    if not listed:
        raise UserError(f"{source}: no such file or folder, or it is empty")
    return sorted(listed, key=lambda file: file.name)


def fetch(url: str, key: str, target: Path) -> None:
    """Copies a file to ``target``.

    Raises:
        UserError: the file cannot be read, or is no longer the one with this key.
    """
    store, path = _open(url)
    try:
        if store.ukey(path) != key:
            raise UserError(f"{url} has changed since the corpus was begun")
        target.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(path, str(target))
    except UserError:
        raise
    except Exception as error:  # each store has its own kinds
        raise UserError(f"{url} cannot be copied: {type(error).__name__}: {error}") from None


def _open(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    if protocol not in (known := fsspec.available_protocols()):
        raise UserError(f"{url}: unknown protocol{nearest(protocol, known)}")
    try:
        store, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f"{url}: {error}") from None
    except Exception as error:
        raise UserError(f"{url} cannot be opened: {type(error).__name__}: {error}") from None
    return store, path


def _below(store: Any, folder: str) -> Iterator[dict[str, Any]]:
    """All files below a folder. The store's own ``find`` leaves out what cannot be listed at a bad moment."""
    for info in store.ls(folder, detail=True):
        path = info["name"].rstrip("/")
        if info["type"] != "directory":
            yield info
        elif path != folder.rstrip("/"):
            yield from _below(store, info["name"])


def _name(path: str, root: str) -> PurePosixPath:
    """The name below the root; for a root that is a file, its last part."""
    if path == root:
        return PurePosixPath(path.rsplit("/", 1)[-1])
    return PurePosixPath(path.removeprefix(root.rstrip("/")).lstrip("/"))
