"""Reads checkpoints with low-rank adapters for a model without adapters, and the other way round."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from m6.architecture.names import adapter_names, is_adapter, plain_name
from m6.checkpoints.format import WEIGHT, CheckpointReader, WeightReader

STATE = "lora"
"""The key of the adapters' rank and alpha in a checkpoint's state; none without adapters."""


def is_adapted(reader: CheckpointReader) -> bool:
    """Whether the checkpoint holds adapters."""
    return reader.state.get(STATE) is not None


class MergedReader(CheckpointReader):
    """Reads a checkpoint with adapters as one without: each weight is W + alpha / rank * B A.

    It has only weights, no optimizer state.

    Args:
        folder: a complete checkpoint with adapters.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._stored = CheckpointReader(folder)
        self._scale = self.state[STATE]["alpha"] / self.state[STATE]["rank"]
        self._ranges = {
            (plain_name(name), kind): ranges
            for (name, kind), ranges in self._ranges.items()
            if kind == WEIGHT and not is_adapter(name)
        }
        self.shapes = {key: ranges[0].shape for key, ranges in self._ranges.items()}

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None:
        """Fills ``target`` as in ``CheckpointReader``; sums are in fp32."""
        names = next((each for each in adapter_names(name) if (each[0], kind) in self._stored.shapes), None)
        if names is None:
            super().read_into(name, kind, offset, target)
            return
        merged = torch.empty(target.numel())
        super().read_into(name, kind, offset, merged)
        down, up = (self._stored.read(each, WEIGHT) for each in names)
        # Multiply only the rows of a matrix, or the matrices of a stack, inside of the range.
        size = math.prod(self.shapes[name, kind][1:])
        first, last = offset // size, -(-(offset + target.numel()) // size)
        product = up[first:last] @ (down if down.dim() == 2 else down[first:last])
        merged += self._scale * product.reshape(-1)[offset - first * size :][: target.numel()]
        target.copy_(merged)


class BaseWeights(WeightReader):
    """Weights of a model without adapters, renamed for the model with adapters.

    Args:
        reader: of the weights.
        names: of the tensors of the model with adapters.
    """

    def __init__(self, reader: WeightReader, names: Iterable[str]) -> None:
        self.folder, self._reader = reader.folder, reader
        self._adapted = {plain_name(name): name for name in names}
        self.shapes = {(self._adapted.get(name, name), kind): shape for (name, kind), shape in reader.shapes.items()}

    def names(self, kind: str) -> list[str]:
        """The names of all tensors of this kind."""
        return [self._adapted.get(name, name) for name in self._reader.names(kind)]

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None:
        """Fills ``target`` with a range of the flat tensor."""
        self._reader.read_into(plain_name(name), kind, offset, target)
