"""Named ranges of flat global tensors: the units of writing and reading checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

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
