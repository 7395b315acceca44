"""Compares the training states of two checkpoints bit by bit, whatever their layouts were."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import WEIGHT, CheckpointReader
from m6.errors import UserError
from m6.runs.directory import RunDirectory

_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``.

    Attributes:
        num_tensors: tensors of both checkpoints; a common one counts once.
        digests: SHA-256 of all tensors of each checkpoint, in an order independent of layouts.
        differences: a line for each different entry of the training state, then for each different tensor in the order
            of the model.
    """

    num_tensors: int
    digests: tuple[str, str]
    differences: list[str]


def open_step(runs: tuple[Path, Path], step: int | None) -> tuple[CheckpointReader, CheckpointReader]:
    """Opens the checkpoints of two runs after a step, and checks their checksums.

    Args:
        step: None: the newest step with a complete checkpoint in both runs.

    Raises:
        UserError: a folder is no run with a complete checkpoint, there is no such step, or a checkpoint is damaged.
    """
    found = []
    for run in runs:
        folders = complete_checkpoints(RunDirectory(run).checkpoints)
        if not folders:
            raise UserError(f"{run}: no folder of a run with a complete checkpoint")
        found.append({int(folder.name.removeprefix("step_")): folder for folder in folders})
    common = sorted(found[0].keys() & found[1].keys())
    if not common or step not in (None, *common):
        wanted = "no step of which both have" if step is None else f"not both have step {step}:"
        steps = "; ".join(
            f"{run} has steps {', '.join(map(str, sorted(each)))}" for run, each in zip(runs, found, strict=True)
        )
        raise UserError(f"{wanted} a complete checkpoint; {steps}")
    chosen = common[-1] if step is None else step
    first, second = (CheckpointReader(each[chosen]) for each in found)
    problems = [*first.verify(), *second.verify()]
    if problems:
        raise UserError("; ".join(problems))
    return first, second


def compare(first: CheckpointReader, second: CheckpointReader) -> Comparison:
    """Compares weights, optimizer state and counters. Numbers are equal if their bits are: -0.0 is not 0.0."""
    differences = [
        f"state {key}: {first.state.get(key)!r} and {second.state.get(key)!r}"
        for key in sorted(first.state.keys() | second.state.keys())
        if first.state.get(key) != second.state.get(key)
    ]
    hashes = (hashlib.sha256(), hashlib.sha256())
    tensors = sorted(first.shapes.keys() | second.shapes.keys(), key=_order)
    for name, kind in tensors:
        counters = _Counters()
        shapes = [reader.shapes.get((name, kind)) for reader in (first, second)]
        for reader, shape, digest in zip((first, second), shapes, hashes, strict=True):
            digest.update(f"{name}|{kind}|{shape}".encode())
            if shape is None or shapes[0] != shapes[1]:
                for part in _parts(reader, name, kind) if shape is not None else ():
                    digest.update(part.numpy().tobytes())
        if shapes[0] != shapes[1]:
            states = [f"shape {shape}" if shape is not None else "missing" for shape in shapes]
            differences.append(f"{kind} of {name}: {states[0]} and {states[1]}")
            continue
        for mine, theirs in zip(_parts(first, name, kind), _parts(second, name, kind), strict=True):
            for digest, part in zip(hashes, (mine, theirs), strict=True):
                digest.update(part.numpy().tobytes())
            counters.add(mine, theirs)
        if counters.differing:
            differences.append(
                f"{kind} of {name}: {counters.differing:,} of {counters.numel:,} elements differ, by at most "
                f"{counters.largest:.3g}, the first at {counters.first:,}"
            )
    return Comparison(len(tensors), (hashes[0].hexdigest(), hashes[1].hexdigest()), differences)


class _Counters:
    """Counts different elements, part by part of a tensor."""

    def __init__(self) -> None:
        self.numel = self.differing = self.first = 0
        self.largest = 0.0

    def add(self, mine: Tensor, theirs: Tensor) -> None:
        unequal = mine.view(torch.int32) != theirs.view(torch.int32)
        if count := int(unequal.sum()):
            if not self.differing:
                self.first = self.numel + int(unequal.int().argmax())
            self.differing += count
            self.largest = max(self.largest, float((mine - theirs).abs().nan_to_num(nan=torch.inf).max()))
        self.numel += mine.numel()


def _parts(reader: CheckpointReader, name: str, kind: str) -> Iterator[Tensor]:
    """Yields a tensor as flat parts in fp32, the type of checkpoints."""
    numel = torch.Size(reader.shapes[name, kind]).numel()
    for begin in range(0, numel, _CHUNK_ELEMENTS):
        part = torch.empty(min(_CHUNK_ELEMENTS, numel - begin))
        reader.read_into(name, kind, begin, part)
        yield part


def _order(tensor: tuple[str, str]) -> tuple[bool, list[tuple[int, str]], str]:
    """Embeddings first, then the layers by number; weights before moments."""
    name, kind = tensor
    parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"[.]", name)]
    return kind != WEIGHT, parts, kind
