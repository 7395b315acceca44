"""The decoding methods for image codes, and the sampling temperature."""

from typing import Literal

Decoding = Literal["masked", "left_to_right"]
"""Masked decoding fills all codes in several passes; ``left_to_right`` generates one code after the other."""
TEMPERATURE = 0.9
"""The default sampling temperature, also of all published drawings."""
_LARGEST_NUMBER = 1000.0  # temperatures below its inverse could make logits overflow


def temperature_refusal(value: object) -> str | None:
    """The reason to refuse a value as sampling temperature; None if it is valid."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return _expected(value)
    return None if value == 0 or 1 / _LARGEST_NUMBER <= value <= _LARGEST_NUMBER else _expected(value)


def _expected(value: object) -> str:
    return f"must be 0, or {1 / _LARGEST_NUMBER:g} to {_LARGEST_NUMBER:g}, found {value}"
