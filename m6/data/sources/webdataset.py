"""WebDataset tar files of the user's own pictures."""

import itertools
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from m6.data.manifest import Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.folders import parse_object
from m6.data.sources.local import (
    MAX_PICTURE_BYTES,
    PICTURE_SUFFIXES,
    TOO_LARGE,
    LocalSource,
    group_of_row,
    label_of_row,
    picture_kind,
    require_column,
    split_of_row,
    written,
)
from m6.data.sources.split_names import own_splits, splits_of_files
from m6.errors import UserError


class WebDataset(LocalSource):
    """WebDataset tar files. ``key.jpg`` and ``key.txt`` or ``key.json`` (with the text column) form one row.

    Other members are not read; in particular, nothing is unpickled. No member is written to disk or followed: a row of
    a link, of a name outside of the archive, or of a very large file has a problem. Questions, labels, splits and
    groups are those of ``key.json``.
    A tar file, or else its folder, may also be named after its split, such as ``train-0000.tar``.

    Args:
        name: name in the manifest.
        folder: folder of the files; ids are relative to it.
        paths: the files.
        options: columns and licence.
        splits: of the files; None: those that they or the folders at the top are named after.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        paths: list[Path],
        options: SourceOptions,
        splits: Mapping[Path, Split | None] | None = None,
    ) -> None:
        super().__init__(name, folder, paths, options)
        if splits is None:
            named = splits_of_files(name, [path.relative_to(folder) for path in paths])
            splits = {path: named[path.relative_to(folder)] for path in paths}
        self._splits = splits
        self.own_splits = own_splits(options, self._splits.values())
        self.columns = {role: column for role, column in options.columns().items() if role not in ("image", "context")}
        self.kind = picture_kind(options)
        self._must_check = False

    def rows(self) -> Iterator[Row]:
        """Yields one row for each key. UserError for a damaged tar file or a column that the first .json lacks."""
        self._must_check = True
        for path in self._paths:
            try:
                yield from self.rows_of(path)
            except (tarfile.TarError, EOFError) as error:
                raise UserError(f"{path} is not a complete tar file: {error}") from None
        missing = self.columns.keys() & {"question", "label", "split", "group"}
        if missing and self._must_check:
            raise UserError(
                f'"{self.name}": --{min(missing)}-column names a key of .json members, and its tar files have none'
            )

    def rows_of(self, path: Path) -> Iterator[Row]:
        """Yields the rows of one tar file. TarError or EOFError for a damaged one.

        By itself it allows .json members without the columns: a row without a caption, say, has an empty text.
        """
        name = f"{self.name}/{path.relative_to(self._folder).as_posix()}"
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for key, group in itertools.groupby((member for member in tar if not member.isdir()), _key):
                identity, parts, problem = f"{name}/{key}", {}, None
                for member in group:
                    suffix = Path(member.name).suffix.lower()
                    if suffix in PICTURE_SUFFIXES or suffix in (".txt", ".json"):
                        problem = problem or _problem_of(member)
                        if problem is None:
                            parts[suffix] = _read(tar, member)
                if problem:
                    yield Row(identity, None, problem=problem)
                else:
                    yield self._row(identity, parts, self._splits[path])
            _check_end(file, tar.offset)

    def _row(self, identity: str, parts: dict[str, bytes], split: Split | None) -> Row:
        images = [content for suffix, content in parts.items() if suffix in PICTURE_SUFFIXES]
        entry = parse_object(parts[".json"]) if ".json" in parts else {}
        if entry is None:
            return Row(identity, None, problem="invalid JSON")
        if ".json" in parts and self._must_check:
            self._must_check = False
            for role, column in self.columns.items():
                if role != "text" or ".txt" not in parts:
                    require_column(column, entry, f"{identity}.json", role)
        try:
            caption = b"" if self._options.question_column else parts.get(".txt", b"")
            text = caption.decode("utf-8-sig") or entry.get(self._options.written_column)
        except UnicodeDecodeError:
            return Row(identity, None, problem="not UTF-8")
        named, problem = split_of_row(entry, self._options)
        if not images:
            problem = "missing image"
        if problem:
            return Row(identity, None, problem=problem)
        group = group_of_row(entry, self._options)
        field = written(text if isinstance(text, str) else "", self._options)
        label = label_of_row(entry, self._options)
        return Row(identity, group, image=images[0], answer=label, split=named or split, **field)


def _key(member: tarfile.TarInfo) -> str:
    folder, _, name = member.name.rpartition("/")
    return f"{folder}/{name.split('.')[0]}".lstrip("/")


def _problem_of(member: tarfile.TarInfo) -> str | None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return "outside of the archive"
    if not member.isfile():
        return "not a regular file"
    return TOO_LARGE if member.size > MAX_PICTURE_BYTES else None


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # rows_of() passes only regular files
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
