"""Input files of a corpus: checksums taken when it was planned, and copies from other machines.

fsspec lists and copies inputs in object stores, on web servers and on the Hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec
from pydantic import BaseModel, ConfigDict, ValidationError

from m6 import files
from m6.data.manifest import Split
from m6.errors import UserError, nearest

_AT_ONCE = 8  # files hashed in parallel


class InputFile(BaseModel):
    """An input file.

    Attributes:
        path: path of a local file, or a URL.
        modified_ns: modification time. A local file with the same size and time counts as unchanged.
        sha256: hash of the contents; for a URL, of the metadata in its store.
        name: path of a remote file relative to the input's folder; None for a local file.
        split: the split in the name of the file or of its top folder, if any.
    """

    model_config = ConfigDict(extra="forbid")

    path: str
    bytes: int
    modified_ns: int
    sha256: str
    name: str | None = None
    split: Split | None = None

    def check_unchanged(self) -> None:
        """Checks a local file against the plan. Remote files are checked when they are copied.

        Raises:
            UserError: the file is gone, or has another size or time.
            StorageError: the file system does not answer.
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
    """Makes entries of local files in parallel. A file with unchanged size and time is not read again.

    Args:
        known: entries of an earlier plan.
        record: a JSON Lines file. Each new entry is appended to it, so an interrupted launch need not hash its files
            again. None: no record.
    """

    def __init__(self, known: Iterable[InputFile] = (), record: Path | None = None) -> None:
        self._record, self._lock = record, threading.Lock()
        lines = record.read_bytes().splitlines() if record is not None and record.exists() else []
        self._known = {file.path: file for file in known}
        for line in lines:
            with contextlib.suppress(ValidationError):  # a crash may cut off a line: its file is read again
                file = InputFile.model_validate_json(line)
                self._known[file.path] = file

    def entries(self, paths: list[Path]) -> list[InputFile]:
        """Returns the entries of files, in the order of the paths."""
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


T = TypeVar("T")
_PAUSES_S = (1.0, 5.0, 25.0)  # before each retry
# Keys of tags and times in the metadata of S3, web servers, Google, Azure, WebDAV, the Hub and file servers.
_TAGS = ("ETag", "etag", "blob_id")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "modified", "mtime", "modify", "created")


@dataclass(frozen=True)
class RemoteFile:
    """A file in a remote store.

    Attributes:
        url: full address, with the protocol.
        name: path relative to the listed folder.
        bytes: size; 0 if the store does not report it.
        key: SHA-256 of its size and its tag or time; "" for an unread file.
    """

    url: str
    name: PurePosixPath
    bytes: int
    key: str

    @property
    def problem(self) -> str | None:
        """Why the file is not copied, or None. A key of an object store may contain ".." and leave the folder."""
        return "file name climbs out of its folder" if ".." in self.name.parts or self.name.is_absolute() else None


def is_remote(source: str) -> bool:
    """Whether a source is a URL, such as ``s3://bucket/folder``."""
    return "://" in source


def list_remote(source: str, is_read: Callable[[PurePosixPath], bool]) -> list[RemoteFile]:
    """Lists all files of a URL in the order of their names. Without a trailing slash the URL may be of one file.

    Args:
        source: the URL.
        is_read: whether a file with this name is read. If a listing has no tags, each such file is looked up by itself.

    Raises:
        UserError: the protocol is unknown or not installed, or the store cannot be read.
    """
    store, root = _open(source)
    try:
        is_file = not source.endswith("/") and store.isfile(root)
        found = [store.info(root)] if is_file else list(_below(store, root))
    except FileNotFoundError:
        found = []
    except Exception as error:  # each store has its own kinds
        raise UserError(f"{source} cannot be listed: {type(error).__name__}: {error}") from None
    if not found:
        raise UserError(f"{source}: no such file or folder, or it is empty")
    listed = [_described(store, info, _name(info["name"], root), is_read) for info in found]
    return sorted(listed, key=lambda file: file.name)


def _described(
    store: Any, info: dict[str, Any], name: PurePosixPath, is_read: Callable[[PurePosixPath], bool]
) -> RemoteFile:
    url = store.unstrip_protocol(info["name"])
    if is_read(name) and not _said(info, _TAGS):
        try:
            info = _persistently(lambda: _looked_at(store, info["name"]))
        except Exception as error:  # each store has its own kinds
            raise UserError(f"{url} cannot be read: {_reason(error)}") from None
    return RemoteFile(url, name, bytes=int(info.get("size") or 0), key=_key(info) if is_read(name) else "")


def fetch(url: str, key: str, target: Path) -> None:
    """Copies a file to ``target``.

    Raises:
        UserError: the file cannot be read, even after retries, or its key has changed.
    """
    store, path = _open(url)

    def copy() -> None:
        info = _looked_at(store, path)
        if _key(info) != key:
            raise UserError(f"{url} has changed since the corpus was begun")
        target.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(path, str(target))
        if info.get("size") not in (None, arrived := target.stat().st_size):
            raise OSError(f"{arrived} of {info['size']} bytes arrived")

    try:
        _persistently(copy)
    except UserError:
        raise
    except Exception as error:  # each store has its own kinds
        raise UserError(f"{url} cannot be copied: {_reason(error)}") from None


def _persistently(action: Callable[[], T]) -> T:
    """Retries an action after pauses, since connections break and servers are busy. A missing file is not retried."""
    for pause in _PAUSES_S:
        try:
            return action()
        except UserError:
            raise
        except Exception as error:  # each store has its own kinds
            if _is_missing(error):
                raise
            time.sleep(pause)
    return action()


def _is_missing(error: Exception) -> bool:
    cause = error.__cause__
    return isinstance(error, FileNotFoundError) and (cause is None or getattr(cause, "status", None) == 404)


def _reason(error: Exception) -> str:
    """The reason of a failure. fsspec reports every failure of a web server as "not found"; the cause tells more."""
    told = error.__cause__ or error
    return f"{type(told).__name__}: {told}"


def _looked_at(store: Any, path: str) -> dict[str, Any]:
    """The current metadata of a file, not the cached metadata of a listing."""
    store.invalidate_cache(path)
    info: dict[str, Any] = store.info(path)
    return info


def _key(info: dict[str, Any]) -> str:
    """A key of a file's version. fsspec's ``ukey`` may differ between a listing and a lookup, or hash the URL only."""
    # A tag is preferred: a listing may round the time differently.
    said = _said(info, _TAGS) or _said(info, _TIMES)
    return hashlib.sha256(f"{info.get('size')} {said}".encode()).hexdigest()


def _said(info: dict[str, Any], names: tuple[str, ...]) -> str:
    """The first of these values in the metadata, or "". Some stores quote tags only in listings or only in lookups."""
    return next((str(info[name]).strip('"') for name in names if info.get(name)), "")


def _open(url: str) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    if protocol not in (known := fsspec.available_protocols()):
        raise UserError(f"{url}: unknown protocol{nearest(protocol, known)}")
    try:
        store, path = fsspec.core.url_to_fs(url, **_options(protocol))
    except ImportError as error:
        raise UserError(f"{url}: {error}") from None
    except Exception as error:
        raise UserError(f"{url} cannot be opened: {type(error).__name__}: {error}") from None
    return store, path


def _options(protocol: str) -> dict[str, Any]:
    """For a web server: a copy may take any time as long as bytes arrive.

    By default aiohttp stops it after five minutes.
    """
    if protocol not in ("http", "https"):
        return {}
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=30, sock_read=60)
    # Merged, since these arguments would otherwise replace the user's own, such as headers.
    return {"client_kwargs": {"timeout": timeout} | fsspec.config.conf.get(protocol, {}).get("client_kwargs", {})}


def _below(store: Any, folder: str) -> Iterator[dict[str, Any]]:
    """All files below a folder. The store's own ``find`` silently skips folders after a failed listing."""
    for info in store.ls(folder, detail=True):
        path = info["name"].rstrip("/")
        if info["type"] != "directory":
            yield info
        elif path != folder.rstrip("/"):
            yield from _below(store, info["name"])


def _name(path: str, root: str) -> PurePosixPath:
    """The path relative to the root; if the root is the file itself, its last part."""
    if path == root:
        return PurePosixPath(path.rsplit("/", 1)[-1])
    return PurePosixPath(path.removeprefix(root.rstrip("/")).lstrip("/"))
