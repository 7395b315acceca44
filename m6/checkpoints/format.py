"""The checkpoint format: flat ranges of named tensors in safetensors shards, and a manifest, written last.

    step_00001200/
        rank_00000_000.safetensors   keys "NAME|KIND|OFFSET", each a flat range
        rank_00000.json              record of the files of rank 0: names, checksums, ranges
        manifest.json                all ranks' records, the training state, its own checksum; exists only when complete

Files are independent of the layout of their run, so a run with any world size, ZeRO stage or ep_size can read them.

The manifest also has the training state: the types of its known keys, and a message for a missing one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from m6.errors import UserError
from m6.files import atomic_path, parse_object, reading, sha256, write_json
from m6.validation import MAX_NUMBER, validate

_Count = Annotated[int, Field(ge=0, le=int(MAX_NUMBER))]


class _Part(BaseModel):
    """A later version may add keys."""

    model_config = ConfigDict(extra="allow", frozen=True)


class _Sharing(_Part):
    num_layers: int = Field(gt=0)
    num_groups: int = Field(gt=0)
    parts: list[str]


class _Stage(_Part):
    stage: Literal["pseudo", "real"]
    switch_step: _Count | None
    sharing: _Sharing
    rule: dict[str, float | None] = {}


class _Adapters(_Part):
    rank: int = Field(gt=0)
    alpha: float


class _State(_Part):
    """Tools write parts of a state, so no key is required here, see ``TrainingState``."""

    step: _Count = 0
    optimizer_step: _Count = 0
    samples_seen: _Count = 0
    tokens_seen: _Count = 0
    tokenizer: str = ""
    image_tokenizer: str | None = None
    model: dict[str, Any] = {}
    next_learning_rate: float | None = None
    lora: _Adapters | None = None
    any_world: dict[str, Any] | None = None
    pseudo_to_real: _Stage | None = None
    loss_scaler: dict[str, float] = {}
    late_update: dict[str, float] | None = None


class TrainingState(dict[str, Any]):
    """The state of a checkpoint; to read a missing key is an error of its file.

    Args:
        values: the parsed JSON.
        where: the file, for the message about a missing key.

    Raises:
        UserError: a value has another type than its key; the message names both.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        try:
            validate(_State, values, "state")
        except UserError as error:
            raise UserError(f"corrupt: {error}") from None
        super().__init__(values)
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise UserError(f'{self._where}: corrupt: its state has no "{key}"')


FORMAT = 2
# The job scripts compute with 64 bits, so a step has at most 18 digits.
_FOLDER = re.compile(r"step_([0-9]{8,18})")
MANIFEST = "manifest.json"
SHARD_BYTES = 4 << 30
_MAX_NAMES = 3
FLOATS = ("F32", "F64", "F16", "BF16")  # as safetensors names types
_TYPES = (*FLOATS, "I64")
COUNTER = ".num_batches_tracked"
"""End of the name of PyTorch's only buffer of integers in a model: batch normalization counts its calls."""


def step_folder(step: int) -> str:
    """The name of the folder of the checkpoint after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None if it has another name."""
    found = _FOLDER.fullmatch(folder.name)
    return None if found is None else int(found[1])


@dataclass(frozen=True)
class Range:
    """Elements ``offset`` to ``offset + numel`` of a flat tensor, and their file.

    Attributes:
        name, kind: of the tensor, see ``Fragment``.
        shape: of the whole tensor.
    """

    name: str
    kind: str
    offset: int
    numel: int
    file: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Range:
        """The range of an entry of a manifest; TypeError if a value is of another type."""
        stored = cls(**{**entry, "shape": tuple(entry["shape"])})
        numbers, texts = (stored.offset, stored.numel, *stored.shape), (stored.name, stored.kind, stored.file)
        are_numbers = all(type(number) is int and number >= 0 for number in numbers)
        if not (are_numbers and all(isinstance(text, str) for text in texts)):
            raise TypeError(f"a range is {entry!r:.200}")
        return stored

    @property
    def key(self) -> str:
        """The name of the range in its safetensors file."""
        return f"{self.name}|{self.kind}|{self.offset}"

    @property
    def end(self) -> int:
        """The first element behind the range."""
        return self.offset + self.numel


def no_progress() -> None:
    """No-op progress callback."""


def write_shards(folder: Path, rank: int, pieces: Iterable[Fragment], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the ranges of one rank and then the rank's record.

    Args:
        pieces: ranges with constant data on the host; read one at a time.
        shard_bytes: the largest size of a file, in bytes; a larger range gets a file of its own.
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
        pending.clear()  # frees the host memory before the next shard is collected

    size = 0
    nonfinite: list[str] = []
    for piece in pieces:
        nbytes = piece.data.numel() * piece.data.element_size()
        if not nbytes:  # a small tensor sharded over many ranks leaves some of them nothing
            continue
        if size + nbytes > shard_bytes:
            flush()
            size = 0
        size += nbytes
        file = f"rank_{rank:05d}_{len(files):03d}.safetensors"
        stored = Range(piece.name, piece.kind, piece.offset, piece.data.numel(), file, piece.shape)
        pending[stored.key] = piece.data
        if not torch.isfinite(piece.data).all():
            nonfinite.append(f"{piece.kind} of {piece.name}")
        ranges.append(stored)
    flush()
    write_json(
        folder / f"rank_{rank:05d}.json",
        {"files": files, "ranges": [asdict(stored) for stored in ranges], "nonfinite": nonfinite},
    )


def write_manifest(folder: Path, world_size: int, state: dict[str, Any]) -> None:
    """Joins all ranks' records into the manifest and so completes the checkpoint.

    Raises:
        UserError: the ranges of all ranks do not cover a tensor, or a value is not finite. The checkpoint then stays
            incomplete, and the one before remains the newest.
    """
    records = [json.loads((folder / f"rank_{rank:05d}.json").read_text()) for rank in range(world_size)]
    ranges = [entry for record in records for entry in record["ranges"]]
    nonfinite = sorted({name for record in records for name in record["nonfinite"]})
    if nonfinite:
        raise UserError(f"{folder}: not completed, since values are not finite: {', '.join(nonfinite[:_MAX_NAMES])}")
    _check_coverage(map(Range.of, ranges), folder)
    manifest = {
        "format": FORMAT,
        "state": state,
        "files": {name: entry for record in records for name, entry in record["files"].items()},
        "ranges": ranges,
    }
    write_json(folder / MANIFEST, {**manifest, "sha256": _digest(manifest)})


def _digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest without its checksum; keys are sorted and blanks left out before hashing."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_step(folder: Path, state: dict[str, Any]) -> None:
    """Raises UserError if a folder with the name of a checkpoint holds another one: a person may have copied it."""
    named = step_of(folder)
    if named is not None and state.get("step", named) != named:
        raise UserError(f"{folder}: holds the checkpoint of step {state['step']}, not that of its name")


def _check_coverage(ranges: Iterable[Range], folder: Path) -> None:
    """Raises UserError if the ranges leave a gap in a tensor: such a checkpoint could not be loaded."""
    tensors: dict[tuple[str, str], list[Range]] = {}
    for stored in ranges:
        tensors.setdefault((stored.name, stored.kind), []).append(stored)
    for (name, kind), parts in tensors.items():
        covered, size = 0, math.prod(parts[0].shape)  # ranges of replicas may overlap, but there must be no gap
        for stored in sorted(parts, key=lambda stored: stored.offset):
            if stored.offset > covered:
                break
            covered = max(covered, stored.end)
        if covered != size:
            raise UserError(f"{folder}: {kind} of {name} has {covered} of {size} elements; a rank's part is missing")
        if any(stored.shape != parts[0].shape for stored in parts):
            raise UserError(f"{folder}: ranges of {kind} of {name} state several shapes")


def open_weights(path: Path) -> safe_open:
    """Opens a safetensors file. It is mapped into memory, so only the parts read so far occupy memory.

    Raises:
        FileNotFoundError: the file is missing.
        SafetensorError: the file is damaged.
        StorageError: the file cannot be opened.
    """
    with reading(path):
        path.open("rb").close()  # gives the reason of a failure: safetensors would call every such file missing
    return safe_open(path, framework="pt")


class WeightReader(Protocol):
    """Reads any range of any tensor of a checkpoint or of an exported model.

    Attributes:
        folder: the source, for error messages.
        shapes: (name, kind) -> shape of the whole tensor.
    """

    folder: Path
    shapes: dict[tuple[str, str], tuple[int, ...]]

    def names(self, kind: str) -> list[str]:
        """The names of all tensors of this kind."""
        ...

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None:
        """Fills ``target`` (1-D) with elements ``offset`` to ``offset + target.numel()`` of the flat tensor."""
        ...


def _reaching_further(one: Range, other: Range) -> Range:
    return other if other.end > one.end else one


class CheckpointReader:
    """Reads any range of any tensor of a complete checkpoint.

    Raises:
        UserError: the manifest is missing, corrupt or of another format.
        StorageError: the manifest cannot be read. The methods raise the same for other files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with reading(folder / MANIFEST):
                text = (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise UserError(f"{folder}: not a complete checkpoint ({MANIFEST} is missing)") from None
        try:
            manifest = parse_object(text)
        except ValueError as error:
            raise UserError(f"{folder / MANIFEST}: corrupt: {error}") from None
        self.shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        self._ranges: dict[tuple[str, str], list[Range]] = {}
        self._open: dict[str, Any] = {}
        try:
            self._read(manifest)
        except UserError as error:
            raise UserError(f"{folder / MANIFEST}: {error}") from None
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{folder / MANIFEST}: corrupt: {type(error).__name__}: {error}") from None
        _check_step(folder, self.state)
        _check_coverage(self.ranges(), folder)
        for stored_ranges in self._ranges.values():
            stored_ranges.sort(key=lambda stored: stored.offset)

    def _read(self, manifest: dict[str, Any]) -> None:
        if manifest["format"] != FORMAT:
            raise UserError(f"format {manifest['format']!r:.80}, this version reads {FORMAT}")
        self.sha256: str = manifest.pop("sha256")
        if self.sha256 != _digest(manifest):
            raise UserError("corrupt (SHA-256 differs from the one it states)")
        self.state: dict[str, Any] = TrainingState(manifest["state"], str(self.folder / MANIFEST))
        self.files: dict[str, dict[str, Any]] = manifest["files"]
        for name, entry in self.files.items():
            if Path(name).name != name:  # a checkpoint of somebody else must not make a reader open other files
                raise UserError(f"corrupt: {name!r} is no file in its folder")
            if not isinstance(entry, dict):
                raise TypeError(f"{name} has the entry {entry!r:.80}")
        if not isinstance(manifest["ranges"], list):
            raise TypeError(f"ranges is {manifest['ranges']!r:.80}")
        for stored in map(Range.of, manifest["ranges"]):
            if stored.file not in self.files:  # no checksum would cover it
                raise UserError(f"corrupt: {stored.file!r}, the file of {stored.key}, is not among its files")
            self._ranges.setdefault((stored.name, stored.kind), []).append(stored)
            self.shapes[stored.name, stored.kind] = stored.shape

    def names(self, kind: str) -> list[str]:
        """The names of all tensors of this kind, in the order of the model."""
        return [name for name, stored_kind in self._ranges if stored_kind == kind]

    def ranges(self) -> Iterator[Range]:
        """Yields every stored range."""
        for stored_ranges in self._ranges.values():
            yield from stored_ranges

    def verify(self, rank: int = 0, world_size: int = 1, on_file: Callable[[], object] = no_progress) -> list[str]:
        """Checks the size and the SHA-256 of this rank's share of the files.

        Args:
            on_file: called after each file.

        Returns:
            one line for each missing or damaged file; empty if all are right.
        """
        problems = []
        for name in sorted(self.files)[rank::world_size]:
            path, expected = self.folder / name, self.files[name]
            try:
                with reading(path):
                    # The size is cheap to check and finds most files truncated by a full disk.
                    if (size := path.stat().st_size) != expected.get("bytes"):
                        problems.append(f"{path}: {size} bytes, the manifest says {expected.get('bytes')}")
                    elif sha256(path) != expected.get("sha256"):
                        problems.append(f"{path}: corrupt (SHA-256 differs from the manifest's)")
            except FileNotFoundError:
                problems.append(f"{path}: missing")
            on_file()
        return problems

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None:
        """Fills ``target`` (1-D) with elements ``offset`` to ``offset + target.numel()`` of the flat tensor."""
        stored_ranges = self._ranges.get((name, kind))
        if stored_ranges is None:
            raise UserError(f"{self.folder}: holds no {kind} of {name}; it belongs to another model or optimizer")
        end, position = offset + target.numel(), offset
        # Ranges of different ranks may overlap, and contain each other. Among the ranges beginning at or before a
        # position, the range with the largest end contains the position if any does.
        offsets = [stored.offset for stored in stored_ranges]
        furthest = list(accumulate(stored_ranges, _reaching_further))
        while position < end:
            index = bisect_right(offsets, position) - 1
            if index < 0 or furthest[index].end <= position:
                raise UserError(
                    f"{self.folder / MANIFEST}: corrupt: no range has element {position} of {name} ({kind})"
                )
            stored = furthest[index]
            stop = min(end, stored.end)
            part = self.read_range(stored, position, stop)
            counts = part.dtype == torch.int64 and name.endswith(COUNTER)
            if part.is_floating_point() != target.is_floating_point() and not counts:
                raise UserError(
                    f"{self.folder / MANIFEST}: corrupt: {stored.key} in {stored.file} is of {part.dtype}, "
                    f"expected {target.dtype}"
                )
            target[position - offset : stop - offset].copy_(part)
            position = stop

    def read(self, name: str, kind: str) -> Tensor:
        """Reads one whole tensor, fp32, in its shape."""
        shape = self.shapes[name, kind]
        flat = torch.empty(torch.Size(shape).numel())
        self.read_into(name, kind, 0, flat)
        return flat.view(shape)

    def element_size(self, stored: Range) -> int:
        """Bytes of one element of a range in its stored type."""
        return self.read_range(stored, stored.offset, stored.offset + 1).element_size()

    def read_range(self, stored: Range, begin: int, end: int) -> Tensor:
        """Reads elements ``begin`` to ``end`` of the flat tensor in their stored type; ``stored`` must contain them.

        Raises:
            UserError: the file is damaged or missing.
        """
        path = self.folder / stored.file
        try:
            if stored.file not in self._open:
                self._open[stored.file] = open_weights(path)
            part = self._open[stored.file].get_slice(stored.key)
            shape, dtype = part.get_shape(), part.get_dtype()
            if shape != [stored.numel] or dtype not in _TYPES:
                raise UserError(
                    f"{self.folder / MANIFEST}: corrupt: {stored.key} in {stored.file} is {dtype} of shape {shape}, "
                    f"expected {' or '.join(_TYPES)} of {[stored.numel]}"
                )
            values: Tensor = part[begin - stored.offset : end - stored.offset]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: unreadable shard: {error}") from None
        return values


WEIGHT = "weight"
LATE_GRADIENT = "late_gradient"
"""The kind of late gradients, to be applied at the end of the next step, see ``m6.gradient_delay``."""
LATE_UPDATE = "late_update"
"""The key of a checkpoint's state with the further values for the update by late gradients; absent without any."""


@dataclass(frozen=True)
class Fragment:
    """A range of a flat global tensor, held by this rank.

    Attributes:
        name: the parameter's name in the model.
        kind: ``weight``, or the optimizer's name for its state (``exp_avg``, ``row_var``, ...).
        offset: first element of the range in the flat global tensor.
        data: [numel], a view into the live state; writing to it changes the training state.
        shape: the global tensor's shape.
        replica: this rank's index among the ranks with the same range, and the number of these ranks.
    """

    name: str
    kind: str
    offset: int
    data: Tensor
    shape: tuple[int, ...]
    replica: tuple[int, int] = (0, 1)

    @property
    def end(self) -> int:
        """The element after the last one of the range, in the flat global tensor."""
        return self.offset + self.data.numel()

    def owned(self) -> Fragment:
        """This rank's part to save: ranks with the same range save equal shares of it."""
        index, count = self.replica
        numel = self.data.numel()
        # Neighbouring shares meet exactly, whatever the remainder of the division.
        begin, end = numel * index // count, numel * (index + 1) // count
        return replace(self, offset=self.offset + begin, data=self.data[begin:end], replica=(0, 1))
