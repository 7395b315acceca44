"""Reads a checkpoint of a Pseudo model as a checkpoint of the Real model: only the names of tensors change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from m6.architecture.sharing import Sharing
from m6.checkpoints.format import LATE_UPDATE, WEIGHT, CheckpointReader

STATE = "pseudo_to_real"
"""The key of the phase (Pseudo or Real) in a checkpoint's state; absent in a run without a Pseudo phase."""


def is_pseudo(reader: CheckpointReader) -> bool:
    """Whether the checkpoint holds the weights of a Pseudo model."""
    return reader.state.get(STATE, {}).get("stage") == "pseudo"


class DelinkedReader(CheckpointReader):
    """Reads a Pseudo model's checkpoint as the Real model's: each layer gets a copy of the shared weights.

    Args:
        folder: a complete checkpoint of a Pseudo model.
        optimizer_state: ``copy``: each layer gets a copy of the moments. ``reset``: all moments are zero, and the
            number of optimizer steps is 0.
    """

    def __init__(self, folder: Path, optimizer_state: str = "copy") -> None:
        super().__init__(folder)
        self.reset = optimizer_state == "reset"
        self.sharing = sharing_of(self)
        self._ranges = {
            (real, kind): stored_ranges
            for (name, kind), stored_ranges in self._ranges.items()
            for real in self.sharing.real_names(name)
        }
        self.shapes = {key: stored_ranges[0].shape for key, stored_ranges in self._ranges.items()}
        self.state = real_state(self.state, self.reset)

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None:
        """Fills ``target`` as in ``CheckpointReader``; after a reset moments are zeros."""
        if self.reset and kind != WEIGHT:
            target.zero_()
        else:
            super().read_into(name, kind, offset, target)


def sharing_of(reader: CheckpointReader) -> Sharing:
    """The weight sharing of the Pseudo model of a checkpoint."""
    saved = reader.state[STATE]["sharing"]
    return Sharing(saved["num_layers"], saved["num_groups"], tuple(saved["parts"]))


def real_state(state: dict[str, Any], reset: bool) -> dict[str, Any]:
    """Converts the state of a Pseudo checkpoint to a Real checkpoint's state at the same step."""
    optimizer_step = 0 if reset else state["optimizer_step"]
    if reset:  # late gradients are dropped with the moments
        state = {key: value for key, value in state.items() if key != LATE_UPDATE}
    return {
        **state,
        "optimizer_step": optimizer_step,
        STATE: {**state[STATE], "stage": "real", "switch_step": state["step"]},
    }
