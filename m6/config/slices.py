"""What ``m6.parallel.pipeline.slices`` cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from m6.data.objectives import OBJECTIVES, is_in_place
from m6.errors import UserError

if TYPE_CHECKING:
    from m6.config.sections import M6Settings


SLICED: Literal["1f1b"] = "1f1b"
"""The schedule that runs slices."""


def check_slices(slices: int | str, run: M6Settings) -> None:
    """Raises UserError if rows cannot be cut.

    Args:
        slices: a number, or "auto".
    """
    name, length = f"m6.parallel.pipeline.slices {slices}", run.data.sequence_length
    if isinstance(slices, int) and slices > length:
        raise UserError(
            f"{name}: a row of m6.data.sequence_length {length} tokens has at most {length} slices; use {length}"
        )
    trained = [each for each in OBJECTIVES if run.objectives.of(each).weight > 0]
    if trained and not run.data.packing and all(map(is_in_place, trained)):
        raise UserError(
            f"{name}: a row can be cut between packed samples and inside of targets that are read from left to right, "
            f"but rows of {length} tokens have one sample (m6.data.packing=false), and all of m6.objectives, "
            f"{', '.join(trained)}, predict targets in place: 0 places; set m6.data.packing=true, or leave slices out"
        )
