"""The values of a stack, which lie in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.optimizer.settings import OptimizerSettings
from offload.runtime.slots import LATE_GRADIENT, WEIGHT, Slot


def read_values(slots: Sequence[Slot], kind: str) -> dict[str, Tensor]:
    """See ``OffloadRuntime.read``.

    Args:
        slots: of all chunks of the stack, in their order.
    """
    pieces = [slot.read(kind) for slot in slots]
    names = slots[0].chunk.stack.matrices
    return {name: torch.cat(values) for name, values in zip(names, zip(*pieces, strict=True), strict=True)}


def write_values(slots: Sequence[Slot], kind: str, values: dict[str, Tensor], optimizer: OptimizerSettings) -> None:
    """See ``OffloadRuntime.write``."""
    stack = slots[0].chunk.stack
    for name, shape in stack.matrices.items():
        expected: tuple[int, ...] = (stack.num_experts, *shape)
        if kind not in (WEIGHT, LATE_GRADIENT):
            expected = optimizer.states(expected)[kind]
        found = tuple(values[name].shape) if name in values else None
        if found != expected:
            raise ValueError(f"{kind} of {stack.name}.{name}: expected the shape {expected}, found {found}")
    for slot in slots:
        first, end = slot.chunk.first_expert, slot.chunk.first_expert + slot.chunk.num_experts
        slot.write(kind, [values[name][first:end] for name in stack.matrices])
