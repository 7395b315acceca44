"""``manifest.json``: contents, origin and licences of a data folder.

    DATA/manifest.json
    DATA/{train,validation,test}/{source}-00000.parquet ...

The manifest contains all row counts, byte counts and checksums. Readers never list or scan the folder.
"""

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from m6 import files
from m6.errors import UserError, nearest
from m6.validation import describe

MANIFEST_NAME = "manifest.json"
SKIPPED_NAME = "skipped.jsonl"  # unusable rows, with the reason
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
SourceKind = Literal["text", "image_text", "vqa", "labelled_text"]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Shard(_Entry):
    """One Parquet file.

    Attributes:
        file: its path relative to the data folder, with forward slashes.
        rows: number of its rows.
        bytes: size of the file.
        sha256: its checksum.
        row_groups: rows of each row group; None in folders of older versions, where readers look into the file.
    """

    file: str
    rows: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    row_groups: list[Annotated[int, Field(ge=1)]] | None = None

    @model_validator(mode="after")
    def _row_groups_add_up(self) -> "Shard":
        if self.row_groups is not None and sum(self.row_groups) != self.rows:
            raise ValueError(f"{self.file}: its row groups have {sum(self.row_groups)} rows together, not {self.rows}")
        return self

    @field_validator("file")
    @classmethod
    def _stays_inside(cls, file: str) -> str:
        # A foreign manifest must not make a reader open files outside the data folder.
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise ValueError("leaves the data folder")
        return file


class SharedRows(_Entry):
    """Numbers of rows of a held-out split with something in common with training rows of their source.

    Attributes:
        rows: rows with any of the following in common.
        picture: rows with an equal or nearly equal image.
        text: rows with an equal caption or text.
        group: rows of the same group.
    """

    rows: int = 0
    picture: int = 0
    text: int = 0
    group: int = 0

    def __str__(self) -> str:
        counts = {"a picture": self.picture, "a caption or text": self.text, "a group": self.group}
        return ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)


class SplitEntry(_Entry):
    """The shards of one split in reading order, their total rows and bytes, and its overlap with training.

    ``shared`` is None for the training split, and if the overlap was not counted.
    """

    rows: int = 0
    bytes: int = 0
    shared: SharedRows | None = None
    shards: list[Shard] = []

    @model_validator(mode="after")
    def _shards_add_up(self) -> "SplitEntry":
        rows, size = sum(shard.rows for shard in self.shards), sum(shard.bytes for shard in self.shards)
        if (self.rows, self.bytes) != (rows, size):
            raise ValueError(f"has {self.rows} rows of {self.bytes} bytes, but its shards {rows} of {size}")
        return self

    @classmethod
    def of(cls, shards: list[Shard]) -> "SplitEntry":
        """Makes the entry of a list of shards."""
        return cls(rows=sum(s.rows for s in shards), bytes=sum(s.bytes for s in shards), shards=shards)


class Origin(_Entry):
    """The origin of a source: a package, a file or a Hub data set.

    Attributes:
        package: its name.
        version: its version or commit.
        licence: its licence.
        sha256: checksum of the read files.
        columns: for the user's own data, the columns read as "text", "image", "label", "split" and "group".
    """

    package: str
    version: str
    licence: str
    sha256: str | None = None
    columns: dict[str, str] | None = None


class SourceEntry(_Entry):
    """One source.

    Attributes:
        kind: kind of the rows, which determines their columns.
        licence: an SPDX expression if there is one.
        origin: origins of the rows.
        own_splits: the splits defined by the source itself; None if not recorded.
        groups: the number of groups. All rows of a group are in one split, unless the source defined its splits.
        splits: the shards.
        skipped: skipped rows by reason.
        unread: counts of ignored members of rows by name, such as ".seg.png" of tars; None if there are none.
    """

    kind: SourceKind
    licence: str
    origin: list[Origin]
    own_splits: list[Split] | None = None
    groups: int | None = None
    splits: dict[Split, SplitEntry]
    skipped: dict[str, int] = {}
    unread: dict[str, int] | None = None


class Manifest(_Entry):
    """The manifest of one data folder. ``recipe`` holds the settings of its build."""

    format: Literal[1] = 1  # raised when the layout of the folder changes
    recipe: dict[str, Any] = {}
    sources: dict[str, SourceEntry]
    _folder: Path = PrivateAttr()

    @classmethod
    def load(cls, path: str | Path) -> "Manifest":
        """Reads ``path/manifest.json``; UserError if it is missing or not a manifest."""
        folder = Path(path)
        file = folder / MANIFEST_NAME
        if not file.is_file():
            raise UserError(f'{file} does not exist; build a data set with "m6 data build ... --out {folder}"')
        try:
            manifest = cls.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise UserError(f"{file} is not a valid manifest: {describe(error, cls, '')}") from None
        manifest._folder = folder
        return manifest

    def save(self, path: str | Path) -> None:
        """Writes ``path/manifest.json`` atomically; equal contents give equal bytes."""
        folder = Path(path)
        files.write_json(folder / MANIFEST_NAME, self.model_dump(exclude_none=True))
        self._folder = folder

    @property
    def folder(self) -> Path:
        """The folder of the manifest's file."""
        return self._folder

    def shrunken(self, image_size: int) -> str | None:
        """Returns a warning if the stored images are smaller than ``image_size`` pixels a side; else None."""
        recipe = self.recipe.get("corpus", self.recipe)
        kept = recipe.get("image_size") if isinstance(recipe, dict) else None
        if not isinstance(kept, int) or kept >= image_size:
            return None
        return (
            f"{self.folder} keeps pictures of {kept} pixels a side at most, which are enlarged to {image_size}; to "
            f"have more of them, build it with image_size {image_size}"
        )

    def split(self, source: str, split: str) -> SplitEntry:
        """Returns the entry of one split, with zero rows if the source has none; UserError for an unknown name."""
        if source not in self.sources:
            raise UserError(f'{self.folder} has no source "{source}"{nearest(source, self.sources)}')
        if split not in SPLITS:
            raise UserError(f'there is no split "{split}"{nearest(split, SPLITS)}')
        return self.sources[source].splits.get(split, SplitEntry())

    def files(self, source: str, split: str) -> list[Path]:
        """Returns the paths of one split's shards in reading order; empty if the split has no rows."""
        return [self.folder / shard.file for shard in self.split(source, split).shards]
