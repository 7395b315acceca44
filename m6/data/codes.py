"""Image codes of a data folder's images, stored per image tokenizer.

    DATA/codes/CHECKSUM16/manifest.json
    DATA/codes/CHECKSUM16/{train,validation,test}/{source}-00000.parquet ...

CHECKSUM16 is the first 16 characters of the image tokenizer's checksum, so a data folder can hold the codes of several
tokenizers. Each shard of codes corresponds to the data shard of the same name. It has the same rows in the same order:
the row's id and its N codes, or null if the image cannot be decoded.
"""

from __future__ import annotations

import collections
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

from m6 import files
from m6.data.manifest import MANIFEST_NAME, SKIPPED_NAME, SPLITS, Manifest, Shard, SplitEntry
from m6.data.pictures import decode_batch, picture_sources, to_unit_range
from m6.data.reader import Rows, open_shards
from m6.data.verification import verify_shards
from m6.errors import StorageError, UserError, nearest
from m6.lock import new_folder
from m6.validation import describe

if TYPE_CHECKING:
    from m6.tokenizers.image import ImageTokenizer

CODES_FOLDER = "codes"
_SOME_TOKENIZER = "IMAGE_TOKENIZER"  # in messages, if its folder is unknown
_METADATA_KEY = b"m6.image_tokenizer"
_GROUP_ROWS = 1024  # rows of a row group
_FOLDER_CHARACTERS = 16  # of the checksum in a folder's name; manifest and shards contain all 64


class CodesManifest(BaseModel):
    """Manifest of a codes folder: the image tokenizer, and the shards per source and split."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    tokenizer: str = Field(pattern="^[0-9a-f]{64}$", description="checksum of the image tokenizer")
    codebook_size: int
    num_codes: int
    codes_per_place: int = 1
    image_size: int
    data: dict[str, str] = Field(description="SHA-256 of each data shard whose pictures were encoded")
    sources: dict[str, dict[str, SplitEntry]]
    skipped: dict[str, dict[str, int]] = {}


def write_codes(
    manifest: Manifest,
    tokenizer: ImageTokenizer,
    sources: Sequence[str] | None = None,
    *,
    batch_size: int = 64,
    max_bad_share: float = 0.01,
    device: torch.device | None = None,
) -> tuple[Path, CodesManifest]:
    """Encodes the images of all splits of the sources and writes their codes.

    If the folder already holds codes of this tokenizer for all data shards, nothing is done. Otherwise the folder is
    written under a temporary name and renamed when it is complete. Codes of unchanged splits are copied. Undecodable
    images get no codes; the manifest counts them and ``skipped.jsonl`` lists them.

    Args:
        manifest: manifest of the data folder.
        tokenizer: image tokenizer in evaluation mode, on ``device``.
        sources: sources to encode; sources with codes are kept as well. By default all sources with images and
            captions.
        batch_size: images encoded at once.
        max_bad_share: largest accepted share of bad images of a source.
        device: device of the tokenizer; by default the CPU.

    Returns:
        The folder of the codes and its manifest.

    Raises:
        UserError: a source is unknown or has no images, or too many of its images are bad.
        StorageError: storage failed; old codes may be whole.
    """
    checksum = tokenizer.checksum
    folder = codes_folder(manifest, checksum)
    existing = load_codes_manifest(manifest, checksum) if has_codes(manifest, checksum) else None
    names = picture_sources(manifest, sources)
    if existing is not None:  # sources with codes stay, unless the data folder has lost them
        names = list(dict.fromkeys([*(name for name in existing.sources if name in manifest.sources), *names]))
    shards = {
        shard.file: shard.sha256 for name in names for split in SPLITS for shard in manifest.split(name, split).shards
    }
    # Equal checksums of the data shards mean that the images have not changed since they were encoded.
    if existing is not None and existing.data.items() >= shards.items():
        return folder, existing
    # The old codes lack a source, or some images have changed.
    with new_folder(folder, replaces=True) as partial:
        entries, skipped = {}, {}
        with (partial / SKIPPED_NAME).open("w", encoding="utf-8") as skip_list:
            for name in names:
                entries[name], bad = _write_source(
                    manifest,
                    name,
                    tokenizer,
                    checksum,
                    partial,
                    batch_size,
                    device or torch.device("cpu"),
                    skip_list,
                    existing,
                )
                rows = sum(entry.rows for entry in entries[name].values())
                if bad.total() > max_bad_share * rows:
                    reasons = ", ".join(f"{reason}: {count}" for reason, count in bad.most_common())
                    raise UserError(
                        f'{manifest.folder}: {bad.total()} of {rows} pictures of source "{name}" are bad ({reasons}), '
                        f"more than --max-bad-share {max_bad_share:g}; nothing was written; --max-bad-share "
                        f"{math.ceil(bad.total() / rows * 1000) / 1000:g} leaves them out"
                    )
                if bad:
                    skipped[name] = dict(bad.most_common())
        written = CodesManifest(
            tokenizer=checksum,
            codebook_size=tokenizer.codebook_size,
            num_codes=tokenizer.num_codes,
            codes_per_place=tokenizer.codes_per_place,
            image_size=tokenizer.image_size,
            data=shards,
            sources=entries,
            skipped=skipped,
        )
        files.write_json(partial / MANIFEST_NAME, written.model_dump(exclude_none=True))
    return folder, written


class Codes:
    """The codes of one split of one source, in the row order of ``open_split``.

    Args:
        manifest: manifest of the data folder.
        source: name of the source.
        split: name of the split.
        checksum: checksum of the image tokenizer.
        tokenizer: its folder or its name on the Hub, for messages.

    Raises:
        UserError: there are no codes of this tokenizer, a shard is damaged, or the images have changed since
            encoding.
        StorageError: a shard cannot be read.
    """

    def __init__(
        self, manifest: Manifest, source: str, split: str, checksum: str, tokenizer: str = _SOME_TOKENIZER
    ) -> None:
        self.manifest = load_codes_manifest(manifest, checksum, tokenizer)
        remedy = _remedy(manifest, tokenizer)
        if source not in self.manifest.sources:
            raise UserError(
                f'{codes_folder(manifest, checksum)} has no codes of source "{source}"'
                f"{nearest(source, self.manifest.sources)}; {remedy}"
            )
        folder = codes_folder(manifest, checksum)
        self._folder, self._remedy = folder, remedy
        for shard in manifest.split(source, split).shards:
            if self.manifest.data.get(shard.file) != shard.sha256:
                raise UserError(f"{manifest.folder / shard.file} has changed since its codes were made; {remedy}")
        entry = self.manifest.sources[source].get(split, SplitEntry())
        if entry.rows != (rows := manifest.split(source, split).rows):
            raise UserError(f"{folder} has codes of {entry.rows} of {rows} rows of {source}, {split}; {remedy}")
        try:
            self._rows = open_shards(folder, entry, ["codes"])
        except StorageError:  # new codes would be as hard to read
            raise
        except UserError as error:
            raise UserError(f"{error}; {remedy}") from None
        # The shards name their tokenizer too: this detects a manifest copied from another folder.
        for shard in entry.shards[:1]:
            recorded = json.loads((pq.read_schema(folder / shard.file).metadata or {}).get(_METADATA_KEY, b"{}"))
            if recorded.get("checksum") != checksum:
                raise UserError(
                    f"{folder / shard.file} holds codes of the image tokenizer {recorded.get('checksum')}, "
                    f"expected {checksum}"
                )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> np.ndarray | None:
        """Returns the int32 codes ``[N]`` of a row, or None if its image could not be decoded."""
        codes = self._rows[row]["codes"]
        if codes is None:
            return None
        limit, number = self.manifest.codebook_size, self.manifest.num_codes
        if len(codes) != number or not all(isinstance(code, int) and 0 <= code < limit for code in codes):
            raise UserError(f"{self._folder}: row {row} has no {number} codes below {limit:,}; {self._remedy}")
        return np.array(codes, np.int32)


def codes_folder(manifest: Manifest, checksum: str) -> Path:
    """Returns the folder for the codes of the image tokenizer with this checksum."""
    return manifest.folder / CODES_FOLDER / checksum[:_FOLDER_CHARACTERS]


def _remedy(manifest: Manifest, tokenizer: str) -> str:
    return f'make them with "m6 data codes {manifest.folder} --image-tokenizer {tokenizer}"'


def has_codes(manifest: Manifest, checksum: str) -> bool:
    """Whether the data folder has codes of the image tokenizer with this checksum."""
    return (codes_folder(manifest, checksum) / MANIFEST_NAME).is_file()


def load_codes_manifest(manifest: Manifest, checksum: str, tokenizer: str = _SOME_TOKENIZER) -> CodesManifest:
    """Reads the manifest of one image tokenizer's codes. ``tokenizer`` is its folder or name, for messages.

    Raises:
        UserError: there are no codes of this tokenizer; the message names tokenizers with codes.
    """
    folder = codes_folder(manifest, checksum)
    if not has_codes(manifest, checksum):
        available = sorted(path.parent.name for path in folder.parent.glob(f"*/{MANIFEST_NAME}"))
        hint = f"; there are codes of {', '.join(available)}" if available else ""
        raise UserError(
            f"{manifest.folder} holds no codes of the image tokenizer {checksum[:_FOLDER_CHARACTERS]}{hint}; "
            f"{_remedy(manifest, tokenizer)}"
        )
    loaded = _load(folder)
    # The folder's name contains only the first characters of the checksum.
    if loaded.tokenizer != checksum:
        raise UserError(f"{folder} holds codes of the image tokenizer {loaded.tokenizer}, expected {checksum}")
    return loaded


def _load(folder: Path) -> CodesManifest:
    try:
        return CodesManifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except ValidationError as error:
        raise UserError(
            f"{folder / MANIFEST_NAME} is not a valid manifest of codes: {describe(error, CodesManifest, '')}"
        ) from None


def _write_source(
    manifest: Manifest,
    source: str,
    tokenizer: ImageTokenizer,
    checksum: str,
    folder: Path,
    batch_size: int,
    device: torch.device,
    skip_list: Any,
    existing: CodesManifest | None,
) -> tuple[dict[str, SplitEntry], collections.Counter[str]]:
    """Writes the codes of one source. Returns its splits and the number of bad images by reason."""
    metadata = {"checksum": checksum, "codebook_size": tokenizer.codebook_size}
    schema = pa.schema(
        [pa.field("id", pa.string(), nullable=False), pa.field("codes", pa.list_(pa.int32(), tokenizer.num_codes))],
        metadata={_METADATA_KEY: json.dumps(metadata)},
    )
    entries: dict[str, SplitEntry] = {}
    skipped = collections.Counter[str]()
    for split in SPLITS:
        taken = None if existing is None else _take_over(manifest, source, split, existing, folder)
        if taken is not None:
            entries[split], bad_ones = taken
            for entry in bad_ones:
                skipped[entry["reason"]] += 1
                skip_list.write(json.dumps(entry, ensure_ascii=False) + "\n")
            continue
        written = []
        for shard in manifest.split(source, split).shards:
            path = folder / shard.file
            path.parent.mkdir(parents=True, exist_ok=True)
            pictures = Rows(manifest.folder, [shard], ["id", "image"])
            row_groups = []
            with (
                pq.ParquetWriter(path, schema, write_page_checksum=True) as writer,
                tqdm(total=len(pictures), desc=f"codes of {source}, {split}", disable=None) as bar,
            ):
                for first in range(0, len(pictures), _GROUP_ROWS):
                    group = [pictures[row] for row in range(first, min(first + _GROUP_ROWS, len(pictures)))]
                    ids: list[str] = [row["id"] for row in group]
                    codes: list[list[int] | None] = []
                    bad: dict[int, str] = {}
                    for begin in range(0, len(group), batch_size):
                        images = [row["image"] for row in group[begin : begin + batch_size]]
                        encoded, problems = _encode(tokenizer, images, device)
                        codes += encoded
                        bad |= {begin + index: reason for index, reason in problems.items()}
                        bar.update(len(images))
                    for index, reason in bad.items():
                        skipped[reason] += 1
                        entry = {"source": source, "split": split, "id": ids[index], "reason": reason}
                        skip_list.write(json.dumps(entry, ensure_ascii=False) + "\n")
                    writer.write_batch(pa.record_batch([pa.array(ids), pa.array(codes, schema.types[1])], schema))
                    row_groups.append(len(group))
            files.sync(path)
            size, sha256 = path.stat().st_size, files.sha256(path)
            written.append(Shard(file=shard.file, rows=shard.rows, bytes=size, sha256=sha256, row_groups=row_groups))
        if written:
            entries[split] = SplitEntry.of(written)
    return entries, skipped


def _take_over(
    manifest: Manifest, source: str, split: str, existing: CodesManifest, folder: Path
) -> tuple[SplitEntry, list[dict[str, str]]] | None:
    """Copies the old codes of a split to ``folder`` if its images have not changed.

    Returns:
        The split and its bad images, as in ``skipped.jsonl``; None if the split must be encoded.
    """
    shards, entry = manifest.split(source, split).shards, existing.sources.get(source, {}).get(split)
    changed = any(existing.data.get(shard.file) != shard.sha256 for shard in shards)
    if entry is None or changed or [old.file for old in entry.shards] != [shard.file for shard in shards]:
        return None
    old_folder = codes_folder(manifest, existing.tokenizer)
    try:
        verify_shards(old_folder, entry.shards)
        with files.reading(old_folder / SKIPPED_NAME):
            listed = [json.loads(line) for line in (old_folder / SKIPPED_NAME).read_text(encoding="utf-8").splitlines()]
    except StorageError:  # new codes would be as hard to read
        raise
    except (OSError, ValueError):  # missing or damaged
        return None
    for shard in entry.shards:
        (folder / shard.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(old_folder / shard.file, folder / shard.file)
    return entry, [line for line in listed if (line["source"], line["split"]) == (source, split)]


def _encode(
    tokenizer: ImageTokenizer, images: list[bytes | None], device: torch.device
) -> tuple[list[list[int] | None], dict[int, str]]:
    """Returns the codes of each image, None for a bad one, and the reasons by index of bad images."""
    pixels, good, bad = decode_batch(images, tokenizer.image_size)
    codes: list[list[int] | None] = [None] * len(images)
    if good:
        for index, encoded in zip(good, tokenizer.encode(to_unit_range(pixels, device)).cpu().tolist(), strict=True):
            codes[index] = encoded
    return codes, bad
