"""Converts the colours of images to one form, whatever their files hold."""

import numpy as np
from PIL import Image


def to_rgba(image: Image.Image) -> Image.Image:
    """Converts an image to RGBA, and 16 bits of grey to 8.

    Pillow itself would turn all levels above 255 into white.

    Raises:
        ValueError: the greatest level is not known, as with 32 bits of grey.
    """
    if image.mode in ("I", "F"):
        raise ValueError(f"a picture of mode {image.mode}; expected 8 bits for a colour, or 16 for grey")
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGBA")
