"""The user's own pictures: a folder with captions, or WebDataset tars."""

import csv
import itertools
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from m6.data.manifest import Origin, SourceKind
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.packages import tree_sha256
from m6.errors import UserError, nearest

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg"})
MAX_MEMBER_BYTES = 64 << 20


class LocalSource:
    """A name, the files and the licence that the user states for them."""

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
        checksum = tree_sha256(self._paths)
        return [Origin(package=self.name, version="local", licence=self._licence, sha256=checksum)]


class PictureFolder(LocalSource):
    """Pictures with captions in ``metadata.jsonl`` or ``metadata.csv`` (column ``file_name`` and the text column,
    as in Hugging Face's imagefolder), or in a ``.txt`` file beside each picture."""

    def __init__(self, name: str, folder: Path, options: SourceOptions) -> None:
        self._folder = folder
        self._pictures = sorted(f for f in folder.rglob("*") if f.suffix.lower() in PICTURE_SUFFIXES)
        captions = sorted(folder.rglob("*.txt"))
        found = [f for f in (folder / "metadata.jsonl", folder / "metadata.csv") if f.is_file()]
        if not self._pictures or not (captions or found):
            raise UserError(
                f"{folder}: expected pictures with metadata.jsonl, metadata.csv or .txt files beside them, "
                "or .parquet, .jsonl or .tar files"
            )
        self._metadata = found[0] if found else None
        super().__init__(name, [*self._pictures, *([self._metadata] if self._metadata else captions)], options)

    def rows(self) -> Iterator[Row]:
        if self._metadata is not None:
            yield from self._described()
            return
        for picture in self._pictures:
            caption = picture.with_suffix(".txt")
            text = caption.read_text(encoding="utf-8", errors="replace") if caption.is_file() else ""
            yield self._row(picture.relative_to(self._folder).as_posix(), text)

    def _described(self) -> Iterator[Row]:
        assert self._metadata is not None
        column = self._options.text_column
        with self._metadata.open(encoding="utf-8-sig", newline="") as file:
            entries: Iterable[Any] = csv.DictReader(file) if self._metadata.suffix == ".csv" else map(_parse, file)
            for number, entry in enumerate(entries):
                if entry is None:
                    identity = f"{self.name}/{self._metadata.name}:{number + 1}"
                    yield Row(identity, identity, problem="invalid JSON")
                    continue
                if number == 0:
                    require_column(column, entry, self._metadata)
                    require_column("file_name", entry, self._metadata)
                yield self._row(str(entry.get("file_name")), entry.get(column))

    def _row(self, file_name: str, text: object) -> Row:
        identity = f"{self.name}/{file_name}"
        picture = resolve_inside(self._folder, file_name)
        if picture is None:
            return Row(identity, identity, problem="missing image")
        return Row(identity, identity, text if isinstance(text, str) else "", picture.read_bytes())


class WebDataset(LocalSource):
    """Tar files whose members ``key.jpg`` and ``key.txt`` or ``key.json`` (with the text column) belong together.

    Members of any other kind are not read, pickled ones above all.
    """

    def rows(self) -> Iterator[Row]:
        for path in self._paths:
            try:
                with tarfile.open(path, mode="r|") as tar:
                    for key, group in itertools.groupby(filter(tarfile.TarInfo.isfile, tar), _key):
                        # Read at once: a streamed archive does not go back.
                        parts = {Path(m.name).suffix.lower(): _read(tar, m) for m in group if _wanted(m)}
                        yield self._row(f"{self.name}/{path.name}/{key}", parts)
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


def resolve_inside(folder: Path, name: str) -> Path | None:
    """The file of that relative name; None when there is none, or when the name leads out of the folder."""
    path = (folder / name).resolve()
    return path if path.is_relative_to(folder.resolve()) and path.is_file() else None


def _parse(line: str | bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _key(member: tarfile.TarInfo) -> str:
    folder, _, name = member.name.rpartition("/")
    return f"{folder}/{name.split('.')[0]}".lstrip("/")


def _wanted(member: tarfile.TarInfo) -> bool:
    suffix = Path(member.name).suffix.lower()
    return member.size <= MAX_MEMBER_BYTES and (suffix in PICTURE_SUFFIXES or suffix in (".txt", ".json"))


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = tar.extractfile(member)
    assert content is not None  # only regular files come here
    return content.read()


def require_column(column: str, columns: Iterable[str], where: object) -> None:
    columns = list(columns)
    if column not in columns:
        raise UserError(f'{where} has no column "{column}"{nearest(column, columns)}')
