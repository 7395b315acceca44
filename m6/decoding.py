"""The ways to draw image codes."""

from typing import Literal

Decoding = Literal["masked", "left_to_right"]
"""All codes at once in several passes, or one after the other."""
