"""The user's own pictures: a folder with captions, or WebDataset tar files."""

import codecs
import csv
import itertools
import json
import stat
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from m6.data.manifest import Origin, SourceKind
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.packages import tree_sha256
from m6.errors import UserError, nearest

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg"})
MAX_LINE_BYTES = 8 << 20  # of metadata.jsonl; a longer line is skipped without being held
MAX_MEMBER_BYTES = 64 << 20  # larger members of a tar file are not read into memory


class LocalSource:
    """Base class of the sources that read local files.

    Args:
        name: name in the manifest.
        paths: all files that are read; the checksum of the origin covers them.
        options: must have a licence.

    Raises:
        UserError: no licence was given.
    """

    kind: SourceKind = "image_text"
    has_test_split = False

    def __init__(self, name: str, paths: list[Path], options: SourceOptions) -> None:
        if options.licence is None:
            raise UserError(
                f'--licence is missing: under which licence may "{name}" be used? It is recorded in the manifest, '
                "for example --licence CC-BY-4.0 or --licence private"
            )
        self.name, self._paths, self._options, self._licence = name, paths, options, options.licence

    def origin(self) -> list[Origin]:
        """Returns one origin with a checksum of all files."""
        checksum = tree_sha256(self._paths)
        return [Origin(package=self.name, version="local", licence=self._licence, sha256=checksum)]


class PictureFolder(LocalSource):
    """A folder of pictures with captions.

    The captions are in ``metadata.jsonl`` or ``metadata.csv`` with the column ``file_name`` and the text column, as in
    Hugging Face's imagefolder, or in a ``.txt`` file next to each picture.

    Raises:
        UserError: the folder has no pictures or no captions.
    """

    def __init__(self, name: str, folder: Path, options: SourceOptions) -> None:
        self._folder = folder
        self._pictures = sorted(f for f in folder.rglob("*") if f.suffix.lower() in PICTURE_SUFFIXES)
        captions = [file for file in sorted(folder.rglob("*.txt")) if unreadable_reason(folder, file) is None]
        metadata = [
            f for f in (folder / "metadata.jsonl", folder / "metadata.csv") if unreadable_reason(folder, f) is None
        ]
        if not self._pictures or not (captions or metadata):
            raise UserError(
                f"{folder}: expected pictures with metadata.jsonl, metadata.csv or .txt files beside them, "
                "or .parquet, .jsonl or .tar files"
            )
        self._metadata = metadata[0] if metadata else None
        # Only files that are read count in the checksum; opening a named pipe or a device could block forever.
        pictures = [file for file in self._pictures if unreadable_reason(folder, file) is None]
        super().__init__(name, [*pictures, *([self._metadata] if self._metadata else captions)], options)

    def rows(self) -> Iterator[Row]:
        """Yields the rows of the metadata file, or one row for each picture."""
        if self._metadata is not None:
            yield from self._metadata_rows()
            return
        for picture in self._pictures:
            caption = picture.with_suffix(".txt")
            readable = unreadable_reason(self._folder, caption) is None
            text = caption.read_text(encoding="utf-8", errors="replace") if readable else ""
            yield self._row(picture.relative_to(self._folder).as_posix(), text)

    def _metadata_rows(self) -> Iterator[Row]:
        assert self._metadata is not None
        column = self._options.text_column
        read = _csv_entries if self._metadata.suffix == ".csv" else _json_entries
        checked = False
        for number, entry in enumerate(read(self._metadata), start=1):
            if isinstance(entry, str):
                identity = f"{self.name}/{self._metadata.name}:{number}"
                yield Row(identity, identity, problem=entry)
                continue
            if not checked:
                checked = True
                require_column(column, entry, self._metadata)
                require_column("file_name", entry, self._metadata)
            yield self._row(str(entry.get("file_name")), entry.get(column))

    def _row(self, file_name: str, text: object) -> Row:
        identity = f"{self.name}/{file_name}"
        picture = self._folder / file_name
        problem = unreadable_reason(self._folder, picture)
        if problem is not None:
            return Row(identity, identity, problem=problem)
        return Row(identity, identity, text if isinstance(text, str) else "", picture.read_bytes())


class WebDataset(LocalSource):
    """WebDataset tar files. ``key.jpg`` and ``key.txt`` or ``key.json`` (with the text column) form one row.

    Other members are not read; in particular, nothing is unpickled.
    """

    def rows(self) -> Iterator[Row]:
        """Yields one row for each key. UserError for a damaged tar file."""
        for path in self._paths:
            try:
                with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
                    for key, group in itertools.groupby(filter(tarfile.TarInfo.isfile, tar), _key):
                        parts = {Path(m.name).suffix.lower(): _read(tar, m) for m in group if _is_readable(m)}
                        yield self._row(f"{self.name}/{path.name}/{key}", parts)
                    _check_end(file, tar.offset)
            except (tarfile.TarError, EOFError) as error:
                raise UserError(f"{path} is not a complete tar file: {error}") from None

    def _row(self, identity: str, parts: dict[str, bytes]) -> Row:
        images = [content for suffix, content in parts.items() if suffix in PICTURE_SUFFIXES]
        text: object = parts.get(".txt", b"").decode("utf-8", "replace")
        if ".json" in parts:
            entry = _parse(parts[".json"])
            if entry is None:
                return Row(identity, identity, problem="invalid JSON")
            text = text or entry.get(self._options.text_column)
        if not images:
            return Row(identity, identity, problem="missing image")
        return Row(identity, identity, text if isinstance(text, str) else "", images[0])


def unreadable_reason(folder: Path, path: Path) -> str | None:
    """Returns why a file of a source is not read: it is missing, lies outside of the folder, or is no regular file."""
    # Resolved first: "..", absolute names and symbolic links must not lead out of the folder.
    try:
        # Resolved first: "..", absolute names and symbolic links must not lead out of the folder.
        resolved = path.resolve()
        if not resolved.is_relative_to(folder.resolve()):
            return "outside of the folder"
        mode = resolved.stat().st_mode
    except (OSError, ValueError, RuntimeError):  # the name is too long or has a NUL, or links form a loop
        return "missing image" if path.suffix.lower() in PICTURE_SUFFIXES else "missing file"
    return None if stat.S_ISREG(mode) else "not a regular file"


def _json_entries(file: Path) -> Iterator[dict[str, Any] | str]:
    """Yields each line of a JSONL file as an object, or as the reason why it is none."""
    with file.open("rb") as lines:
        while line := lines.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := lines.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield "line too long"
                continue
            yield _parse(line.removeprefix(codecs.BOM_UTF8)) or "invalid JSON"


def _csv_entries(file: Path) -> Iterator[dict[str, Any] | str]:
    """Yields the rows of a CSV file, or what is wrong with one; UserError for a file that is not CSV in UTF-8."""
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        # utf-8-sig: spreadsheet programs write CSV files with a byte order mark.
        with file.open(encoding="utf-8-sig", newline="") as lines:
            for entry in csv.DictReader(lines):
                # Fields beyond the header are under the key None.
                yield "more fields than columns" if None in entry else entry
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.object[error.start]:#04x}): save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{file} is not a CSV file that can be read: {error}") from None
    finally:
        csv.field_size_limit(limit)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return None
    return entry if isinstance(entry, dict) else None


def _key(member: tarfile.TarInfo) -> str:
    folder, _, name = member.name.rpartition("/")
    return f"{folder}/{name.split('.')[0]}".lstrip("/")


def _is_readable(member: tarfile.TarInfo) -> bool:
    suffix = Path(member.name).suffix.lower()
    return member.size <= MAX_MEMBER_BYTES and (suffix in PICTURE_SUFFIXES or suffix in (".txt", ".json"))


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # rows() passes only regular files
    content = file.read()
    if len(content) != member.size:
        raise tarfile.ReadError(f"{member.name} ends after {len(content)} of {member.size} bytes")
    return content


def _check_end(file: BinaryIO, offset: int) -> None:
    """Raises ReadError if the archive has no end marker at ``offset``, where reading stopped.

    ``tarfile`` also stops, without an error, at a damaged header and at the end of a truncated file.
    """
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"no further member and no end of the archive at byte {offset}")


def require_column(column: str, columns: Iterable[str], where: object) -> None:
    """Raises UserError if ``column`` is not in ``columns``; ``where`` names the file or data set in the message."""
    columns = list(columns)
    if column not in columns:
        raise UserError(f'{where} has no column "{column}"{nearest(column, columns)}')
