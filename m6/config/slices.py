"""What ``m6.parallel.pipeline.slices`` cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from m6.architecture.settings import ModelSettings
from m6.data.objectives import OBJECTIVES, is_in_place
from m6.errors import UserError

if TYPE_CHECKING:
    from m6.config.sections import M6Settings


SLICED: Literal["1f1b"] = "1f1b"
"""The schedule that runs slices."""


def check_slices(slices: int | str, schedule: str, run: M6Settings, model: ModelSettings) -> None:
    """Raises UserError if rows cannot be cut, or if slices would not learn what whole rows do.

    Args:
        slices: a number, or "auto".
    """
    name, length = f"m6.parallel.pipeline.slices {slices}", run.data.sequence_length
    if schedule != SLICED:
        raise UserError(
            f'{name}: backward passes of slices come in reverse order, which "schedule": "{schedule}" does not know; '
            f'use "schedule": "{SLICED}", or leave slices out'
        )
    if isinstance(slices, int) and slices > length:
        raise UserError(
            f"{name}: a row of m6.data.sequence_length {length} tokens has at most {length} slices; use {length}"
        )
    capacity = None if model.moe is None else model.moe_config().capacity_factor
    if capacity is not None:
        raise UserError(
            f"{name}: with m6.moe.capacity_factor {capacity} each slice would have a capacity of its own and drop "
            "other tokens than whole rows; use capacity_factor=null, or leave slices out"
        )
    if run.offload is not None:
        raise UserError(
            f"{name}: plans of m6.offload know a step of whole micro-batches, of which each would have other slices; "
            "leave one of them out"
        )
    trained = [each for each in OBJECTIVES if run.objectives.of(each).weight > 0]
    if trained and not run.data.packing and all(map(is_in_place, trained)):
        raise UserError(
            f"{name}: a row can be cut between packed samples and inside of targets that are read from left to right, "
            f"but rows of {length} tokens have one sample (m6.data.packing=false), and all of m6.objectives, "
            f"{', '.join(trained)}, predict targets in place: 0 places; set m6.data.packing=true, or leave slices out"
        )
