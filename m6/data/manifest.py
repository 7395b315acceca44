"""``manifest.json``: what a data folder holds, where it came from and under which licence.

    DATA/manifest.json
    DATA/{train,validation,test}/{source}-00000.parquet ...

Every row count, byte count and checksum of the folder stands here, so that readers never list or scan it.
"""

from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from m6 import files
from m6.errors import UserError, nearest

MANIFEST_NAME = "manifest.json"
SKIPPED_NAME = "skipped.jsonl"  # beside it: what could not be used, and why
SPLITS: tuple[str, ...] = ("train", "validation", "test")

Split = Literal["train", "validation", "test"]
Kind = Literal["text", "image_text", "vqa", "labelled_text"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Shard(_Entry):
    """One Parquet file; ``file`` is relative to the data folder, with forward slashes."""

    file: str
    rows: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @field_validator("file")
    @classmethod
    def _stays_inside(cls, file: str) -> str:
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise ValueError("leaves the data folder")
        return file


class SplitEntry(_Entry):
    """The shards of one split in reading order, and their sums."""

    rows: int = 0
    bytes: int = 0
    shards: list[Shard] = []

    @classmethod
    def of(cls, shards: list[Shard]) -> "SplitEntry":
        """Sums the shards."""
        return cls(rows=sum(s.rows for s in shards), bytes=sum(s.bytes for s in shards), shards=shards)


class Origin(_Entry):
    """A package, file or hub data set that a source was made from; ``sha256`` is of what was read."""

    package: str
    version: str
    licence: str
    sha256: str | None = None


class SourceEntry(_Entry):
    """One source. ``skipped`` counts the rows that were left out, by reason; ``licence`` is an SPDX expression
    where there is one."""

    kind: Kind
    licence: str
    origin: list[Origin]
    splits: dict[Split, SplitEntry]
    skipped: dict[str, int] = {}


class Manifest(_Entry):
    """The parsed manifest of one data folder. ``recipe`` holds the settings that the folder was built with."""

    format: Literal[1] = 1
    recipe: dict[str, Any] = {}
    sources: dict[str, SourceEntry]
    _folder: Path = PrivateAttr()

    @classmethod
    def load(cls, path: str | Path) -> "Manifest":
        """Reads ``path/manifest.json``; raises UserError when it is missing or not a manifest."""
        folder = Path(path)
        file = folder / MANIFEST_NAME
        if not file.is_file():
            raise UserError(f'{file} does not exist; build a data set with "m6 data build ... --out {folder}"')
        try:
            manifest = cls.model_validate_json(file.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the file"
            raise UserError(f"{file} is not a valid manifest: {place}: {first['msg']}") from None
        manifest._folder = folder
        return manifest

    def save(self, path: str | Path) -> None:
        """Writes ``path/manifest.json`` atomically; same contents give the same bytes."""
        folder = Path(path)
        files.write_json(folder / MANIFEST_NAME, self.model_dump(exclude_none=True))
        self._folder = folder

    @property
    def folder(self) -> Path:
        """The folder that the manifest was loaded from or saved to."""
        return self._folder

    def split(self, source: str, split: str) -> SplitEntry:
        """The entry of one split (with zero rows where there is none); UserError for an unknown name."""
        if source not in self.sources:
            raise UserError(f'{self.folder} has no source "{source}"{nearest(source, self.sources)}')
        if split not in SPLITS:
            raise UserError(f'there is no split "{split}"{nearest(split, SPLITS)}')
        return self.sources[source].splits.get(split, SplitEntry())  # type: ignore[call-overload]

    def files(self, source: str, split: str) -> list[Path]:
        """The shards of one split in reading order (an empty list where it has no rows)."""
        return [self.folder / shard.file for shard in self.split(source, split).shards]

    def verify(self) -> None:
        """Compares every shard with its size and checksum; UserError names the first that differs."""
        for entry in self.sources.values():
            for split in entry.splits.values():
                for shard in split.shards:
                    file = self.folder / shard.file
                    if not file.is_file():
                        raise UserError(f"{file} is missing, but {MANIFEST_NAME} lists it")
                    if file.stat().st_size != shard.bytes:
                        raise UserError(f"{file} has {file.stat().st_size} bytes, expected {shard.bytes}")
                    if files.sha256(file) != shard.sha256:
                        raise UserError(f"{file} is damaged: its SHA-256 differs from {MANIFEST_NAME}")
