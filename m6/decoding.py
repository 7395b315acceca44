"""The ways to draw image codes, and the temperature."""

from typing import Literal

Decoding = Literal["masked", "left_to_right"]
"""All codes at once in several passes, or one after the other."""
TEMPERATURE = 0.9
"""Of drawing, unless a model or a caller names another; that of all published drawings."""
_LARGEST = 1000.0  # divided by less than its inverse, logits could overflow


def temperature_refusal(value: object) -> str | None:
    """Why a value is no temperature to draw with; None if it is one."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return _expected(value)
    return None if value == 0 or 1 / _LARGEST <= value <= _LARGEST else _expected(value)


def _expected(value: object) -> str:
    return f"must be 0, or {1 / _LARGEST:g} to {_LARGEST:g}, found {value}"
