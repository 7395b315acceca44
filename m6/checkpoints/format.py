"""The checkpoint on disk: flat ranges of named tensors in safetensors shards, and a manifest that is written last.

    step_00001200/
        rank_00000_000.safetensors   keys "NAME|KIND|OFFSET", each a flat range
        rank_00000.json              what rank 0 wrote: files, checksums, ranges
        manifest.json                all ranks' records, the training state, its own checksum; exists only when complete

No file mentions the layout it was written under, so any world size, ZeRO stage or ep_size can read it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from m6.checkpoints.fragment import WEIGHT, Fragment
from m6.errors import UserError
from m6.files import atomic_path, sha256, write_json

FORMAT = 2
MANIFEST = "manifest.json"
SHARD_BYTES = 4 << 30
_MAX_NAMES = 3


@dataclass(frozen=True)
class Range:
    """Where elements ``offset`` to ``offset + numel`` of a flat tensor are stored."""

    name: str
    kind: str
    offset: int
    numel: int
    file: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.name}|{self.kind}|{self.offset}"


def write_shards(folder: Path, rank: int, pieces: Iterable[Fragment], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes one rank's ranges and, last, the record that says they are there.

    Args:
        pieces: ranges whose data is on the host and no longer changes; taken one by one.
        shard_bytes: of one file; a single larger range has a file of its own.
    """
    files: dict[str, dict[str, Any]] = {}
    ranges: list[Range] = []
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        if not pending:
            return
        name = f"rank_{rank:05d}_{len(files):03d}.safetensors"
        with atomic_path(folder / name) as temporary:
            save_file(pending, temporary)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        pending.clear()

    size = 0
    nonfinite: list[str] = []
    for piece in pieces:
        nbytes = piece.data.numel() * piece.data.element_size()
        if not nbytes:
            continue
        if size + nbytes > shard_bytes:
            flush()
            size = 0
        size += nbytes
        file = f"rank_{rank:05d}_{len(files):03d}.safetensors"
        place = Range(piece.name, piece.kind, piece.offset, piece.data.numel(), file, piece.shape)
        pending[place.key] = piece.data
        if piece.kind == WEIGHT and not torch.isfinite(piece.data).all():
            nonfinite.append(piece.name)
        ranges.append(place)
    flush()
    write_json(
        folder / f"rank_{rank:05d}.json",
        {"files": files, "ranges": [asdict(place) for place in ranges], "nonfinite": nonfinite},
    )


def write_manifest(folder: Path, world_size: int, state: dict[str, Any]) -> None:
    """Joins all ranks' records; with this file the checkpoint is complete.

    Raises:
        UserError: the ranks' ranges leave a gap in a tensor, or a weight is not finite: from such a checkpoint a run
            could not go on, so it stays incomplete and the one before remains the newest.
    """
    records = [json.loads((folder / f"rank_{rank:05d}.json").read_text()) for rank in range(world_size)]
    ranges = [place for record in records for place in record["ranges"]]
    nonfinite = sorted({name for record in records for name in record["nonfinite"]})
    if nonfinite:
        raise UserError(f"{folder}: not completed, since weights are not finite: {', '.join(nonfinite[:_MAX_NAMES])}")
    _check_coverage(ranges, folder)
    manifest = {
        "format": FORMAT,
        "state": state,
        "files": {name: entry for record in records for name, entry in record["files"].items()},
        "ranges": ranges,
    }
    write_json(folder / MANIFEST, {**manifest, "sha256": _digest(manifest)})


def _digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest without its own checksum, of the form that does not depend on blanks and order."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_coverage(ranges: list[dict[str, Any]], folder: Path) -> None:
    tensors: dict[tuple[str, str], list[tuple[int, int]]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for place in ranges:
        key = (place["name"], place["kind"])
        tensors.setdefault(key, []).append((place["offset"], place["offset"] + place["numel"]))
        sizes[key] = torch.Size(place["shape"]).numel()
    for key, spans in tensors.items():
        covered = 0
        for begin, end in sorted(spans):
            if begin > covered:
                break
            covered = max(covered, end)
        if covered != sizes[key]:
            raise UserError(
                f"{folder}: {key[1]} of {key[0]} has {covered} of {sizes[key]} elements; a rank's part is missing"
            )


class WeightReader(Protocol):
    """Any range of any tensor of a checkpoint, or of something that is read like one."""

    folder: Path
    shapes: dict[tuple[str, str], tuple[int, ...]]
    """by name and kind"""

    def names(self, kind: str) -> list[str]: ...

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None: ...


class CheckpointReader:
    """Reads any range of any tensor of a complete checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{folder}: not a complete checkpoint ({MANIFEST} is missing)") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / MANIFEST}: corrupt: {error}") from None
        self.shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        self._ranges: dict[tuple[str, str], list[Range]] = {}
        self._open: dict[str, Any] = {}
        try:
            if manifest["format"] != FORMAT:
                raise UserError(f"{folder / MANIFEST}: format {manifest['format']!r}, this version reads {FORMAT}")
            if manifest.pop("sha256") != _digest(manifest):
                raise UserError(f"{folder / MANIFEST}: corrupt (SHA-256 differs from the one it states)")
            self.state: dict[str, Any] = manifest["state"]
            self.files: dict[str, dict[str, Any]] = manifest["files"]
            for entry in manifest["ranges"]:
                place = Range(**{**entry, "shape": tuple(entry["shape"])})
                self._ranges.setdefault((place.name, place.kind), []).append(place)
                self.shapes[place.name, place.kind] = place.shape
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / MANIFEST}: corrupt: {type(error).__name__}: {error}") from None
        for places in self._ranges.values():
            places.sort(key=lambda place: place.offset)

    def names(self, kind: str) -> list[str]:
        """Names of the tensors of one kind, in the order of the model."""
        return [name for name, other in self._ranges if other == kind]

    def ranges(self) -> Iterator[Range]:
        """Every range as it is stored."""
        for places in self._ranges.values():
            yield from places

    def verify(self, rank: int = 0, world_size: int = 1) -> list[str]:
        """Checks size and SHA-256 of every ``world_size``-th file; returns what is wrong, naming each file."""
        problems = []
        for name in sorted(self.files)[rank::world_size]:
            path, expected = self.folder / name, self.files[name]
            try:
                if path.stat().st_size != expected.get("bytes"):
                    problems.append(f"{path}: {path.stat().st_size} bytes, the manifest says {expected.get('bytes')}")
                elif sha256(path) != expected.get("sha256"):
                    problems.append(f"{path}: corrupt (SHA-256 differs from the manifest's)")
            except FileNotFoundError:
                problems.append(f"{path}: missing")
            except OSError as error:
                problems.append(f"{path}: unreadable: {error}")
        return problems

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None:
        """Fills ``target`` (1-D) with elements ``offset`` to ``offset + target.numel()`` of the flat tensor."""
        places = self._ranges.get((name, kind))
        if places is None:
            raise UserError(f"{self.folder}: holds no {kind} of {name}; it belongs to another model or optimizer")
        end, position = offset + target.numel(), offset
        index = max(0, bisect_right([place.offset for place in places], offset) - 1)
        while position < end:
            place = places[index]
            index += 1
            if place.offset + place.numel <= position:
                continue
            stop = min(end, place.offset + place.numel)
            target[position - offset : stop - offset].copy_(self.read_range(place, position, stop))
            position = stop

    def read(self, name: str, kind: str) -> Tensor:
        """One whole tensor in its shape."""
        shape = self.shapes[name, kind]
        flat = torch.empty(torch.Size(shape).numel())
        self.read_into(name, kind, 0, flat)
        return flat.view(shape)

    def element_size(self, place: Range) -> int:
        """Bytes of one element of a range."""
        return self.read_range(place, place.offset, place.offset + 1).element_size()

    def read_range(self, place: Range, begin: int, end: int) -> Tensor:
        """Elements ``begin`` to ``end`` of the flat tensor, all of which lie in ``place``, in the stored type."""
        path = self.folder / place.file
        try:
            if place.file not in self._open:
                self._open[place.file] = safe_open(path, framework="pt")
            part: Tensor = self._open[place.file].get_slice(place.key)[begin - place.offset : end - place.offset]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: unreadable shard: {error}") from None
        if len(part) != end - begin:
            raise UserError(f"{self.folder / MANIFEST}: corrupt: {place.key} is not as long in {place.file}")
        return part
