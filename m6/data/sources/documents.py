"""The user's own plain texts: .txt and .md files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from m6.data.manifest import SourceKind, Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.local import LocalSource
from m6.data.sources.split_names import split_folders, split_of_folder
from m6.data.sources.table_rows import passage_rows
from m6.files import reading

MAX_DOCUMENT_BYTES = 256 << 20


class Documents(LocalSource):
    """Plain text or Markdown files; each file is a document, which is cut into passages.

    Args:
        name: name in the manifest.
        folder: folder of the files; ids are relative to it.
        files: the files.
        options: the licence, and the length of passages.
        splits: of the files; None: those that the folders at the top are named after.
    """

    FORMATS: ClassVar[tuple[str, ...]] = (".txt", ".md")
    kind: SourceKind = "text"

    def __init__(
        self,
        name: str,
        folder: Path,
        files: list[Path],
        options: SourceOptions,
        splits: Mapping[Path, Split | None] | None = None,
    ) -> None:
        super().__init__(name, folder, files, options)
        relative = {file: file.relative_to(folder) for file in files}
        self._names = {file: f"{name}/{part.as_posix()}" for file, part in relative.items()}
        if splits is None:
            folders = split_folders(name, relative.values())
            splits = {file: split_of_folder(part, folders) for file, part in relative.items()}
        self._splits = splits
        self.own_splits = frozenset(split for split in self._splits.values() if split)

    def rows(self) -> Iterator[Row]:
        """Yields the passages of each file; equal files are in one split."""
        for file in self._paths:
            identity, split = self._names[file], self._splits[file]
            if file.stat().st_size > MAX_DOCUMENT_BYTES:
                yield Row(identity, identity, problem=f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
                continue
            try:
                with reading(file):
                    text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError:
                yield Row(identity, identity, problem="not UTF-8")
                continue
            yield from passage_rows(text, identity, None, split, self._options)
