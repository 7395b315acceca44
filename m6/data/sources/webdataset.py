"""WebDataset tar files of the user's own images."""

import itertools
import tarfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from m6.data.manifest import Split
from m6.data.sources.base import Row, SourceOptions, count_unread
from m6.data.sources.folders import parse_object
from m6.data.sources.local import (
    MAX_PICTURE_BYTES,
    PICTURE_SUFFIXES,
    TOO_LARGE,
    LocalSource,
    group_of_row,
    is_apple_double,
    label_of_row,
    note_hidden,
    note_unread_columns,
    own_splits,
    picture_kind,
    require_column,
    split_of_row,
    splits_of_files,
    text_problem,
    written,
)
from m6.data.sources.text import clean
from m6.errors import UserError

_TWO_PICTURES = "two pictures, such as KEY.jpg and KEY.png"
_TWO_MEMBERS = "two members of one name"
_APART = "its members are not next to each other in the archive"


class WebDataset(LocalSource):
    """WebDataset tar files. ``key.jpg`` and ``key.txt`` or ``key.json`` (with the text column) form one row.

    The key is the name up to its first dot. A sample has one image: a sample with two, such as ``key.jpg`` and
    ``key.png``, or with two members of one name, is a bad row. So are later members of a key after other keys: an
    archive is read once, from its beginning to its end. The caption is in ``key.txt``, or else in ``key.json``. Other
    members, such as ``key.seg.png`` and ``key.pkl``, are counted and not read; in particular, nothing is unpickled.
    Hidden members are not read. No member is written to disk and no link is followed: a link, a name outside of the
    archive, or a very large file makes a bad row. Questions, labels, splits and groups come from ``key.json``. A tar
    file or its top folder may also be named after its split, such as ``train-0000.tar``.

    Args:
        name: name in the manifest.
        folder: folder of the files; ids are relative to it.
        paths: the files.
        options: columns and licence.
        splits: splits of the files; None: by the names of the files or the top folders.
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
        # With a question column no captions are read.
        self._read = PICTURE_SUFFIXES | {".json"} | (set() if options.question_column else {".txt"})
        self._must_check = False

    def rows(self) -> Iterator[Row]:
        """Yields one row for each key. UserError for a damaged tar file or a column missing in the first .json."""
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
        """Yields the rows of one tar file. TarError or EOFError if it is damaged.

        Called directly, it accepts .json members without the columns: a row without a caption has an empty text.
        """
        name = f"{self.name}/{path.relative_to(self._folder).as_posix()}"
        seen: set[int] = set()  # hashes of keys: an archive may have millions
        hidden: list[PurePosixPath] = []

        def is_shown(member: tarfile.TarInfo) -> bool:
            file = PurePosixPath(member.name)
            if member.isdir() or is_apple_double(file):
                return False
            if not file.name.startswith("."):
                return True
            if f".{file.name.rpartition('.')[2].lower()}" in self._read:
                hidden.append(file)
            return False

        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for key, group in itertools.groupby(filter(is_shown, tar), _key):
                sample = _Sample(tar, group, self._read)
                if hash(key) in seen:
                    sample.refuse(_APART)
                seen.add(hash(key))
                yield self._row(f"{name}/{key}", sample, self._splits[path])
            _check_end(file, tar.offset)
        note_hidden(name, hidden)

    def _row(self, identity: str, sample: "_Sample", split: Split | None) -> Row:
        entry: dict[str, Any] = {}
        problem, text, named = sample.problem, "", split
        if problem is None and ".json" in sample.parts:
            parsed = parse_object(sample.parts[".json"])
            if isinstance(parsed, str):
                problem = parsed
            else:
                entry = parsed
                if self._must_check:
                    self._check_columns(f"{identity}.json", entry, has_text=".txt" in sample.parts)
        if problem is None:
            text, problem = self._text(sample, entry)
        if problem is None:
            named, problem = split_of_row(entry, self._options)
        unread = tuple(sample.unread.items())
        if problem is not None or sample.image is None:
            # The image is kept, for callers without need of a caption.
            return Row(identity, None, image=sample.image, problem=problem or sample.why_no_image(), unread=unread)
        group, label = group_of_row(entry, self._options), label_of_row(entry, self._options)
        field = written(text, self._options)
        return Row(identity, group, image=sample.image, answer=label, split=named or split, unread=unread, **field)

    def _check_columns(self, where: str, entry: dict[str, Any], has_text: bool) -> None:
        self._must_check = False
        for role, column in self.columns.items():
            if role != "text" or not has_text:
                require_column(column, entry, where, role)
        note_unread_columns(f"{self.name}: .json", entry, self.columns.values())

    def _text(self, sample: "_Sample", entry: dict[str, Any]) -> tuple[str, str | None]:
        """The caption or question, and the reason if it is unreadable. A different text in .json counts as unread."""
        value = entry.get(self._options.written_column)
        try:
            caption = sample.parts.get(".txt", b"").decode("utf-8-sig")
        except UnicodeDecodeError:
            return "", "not UTF-8"
        if caption.strip():
            if value is not None and (not isinstance(value, str) or clean(value) != clean(caption)):
                count_unread(sample.unread, [(f"{self._options.text_column!r} of .json", 1)])
            return caption, None
        return ("", None) if value is None else (value, text_problem(value, self._options))


class _Sample:
    """The members of a key: contents of the read members, and names of the others.

    Attributes:
        parts: contents by suffix.
        image: contents of the image.
        unread: numbers of ignored members by the rest of the name after the key.
        problem: why the sample is unusable, if so.
    """

    def __init__(self, tar: tarfile.TarFile, members: Iterable[tarfile.TarInfo], read: Collection[str]) -> None:
        self.parts: dict[str, bytes] = {}
        self.image: bytes | None = None
        self.unread: Counter[str] = Counter()
        self.problem: str | None = None
        for member in members:
            suffix = _suffix(member)
            if suffix not in read:
                count_unread(self.unread, [(suffix or "without a suffix", 1)])
                continue
            self.problem = self.problem or _problem_of(member) or self._repeated(suffix)
            if self.problem is None:
                content = _read(tar, member)
                if suffix in PICTURE_SUFFIXES:
                    self.image = content
                self.parts[suffix] = content
        if self.problem in (_TWO_PICTURES, _TWO_MEMBERS):
            self.image = None  # either image might be meant

    def refuse(self, problem: str) -> None:
        """Makes the sample unusable: nobody knows which of several images or captions is meant."""
        self.problem, self.image = problem, None

    def _repeated(self, suffix: str) -> str | None:
        if suffix in self.parts:
            return _TWO_MEMBERS
        return _TWO_PICTURES if suffix in PICTURE_SUFFIXES and self.image is not None else None

    def why_no_image(self) -> str:
        """Why there is no image."""
        is_named_longer = any(PurePosixPath(name).suffix in PICTURE_SUFFIXES for name in self.unread)
        return "missing image (its pictures have longer names, as KEY.seg.png)" if is_named_longer else "missing image"


def _key(member: tarfile.TarInfo) -> str:
    folder, _, name = member.name.rpartition("/")
    return f"{folder}/{name.split('.')[0]}".lstrip("/")


def _suffix(member: tarfile.TarInfo) -> str:
    _, dot, suffix = member.name.rpartition("/")[2].partition(".")
    return dot + suffix.lower()


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
    """Raises ReadError if the archive has no end marker at ``offset``, the end of reading.

    ``tarfile`` also stops, without an error, at a damaged header and at the end of a truncated file.
    """
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"no further member and no end of the archive at byte {offset}")
