"""Altered copies of a picture, as they occur on web pages."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

from PIL import Image, ImageEnhance


def jpeg(picture: Image.Image, quality: int = 90) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def cropped(picture: Image.Image, share: float, rng: random.Random) -> Image.Image:
    """A window at a random place, with both sides shorter by a share."""
    width, height = round(picture.width * (1 - share)), round(picture.height * (1 - share))
    x, y = rng.randint(0, picture.width - width), rng.randint(0, picture.height - height)
    return picture.crop((x, y, x + width, y + height))


def resized(picture: Image.Image, across: float, down: float) -> Image.Image:
    return picture.resize((round(picture.width * across), round(picture.height * down)), Image.Resampling.LANCZOS)


ALTERATIONS: dict[str, Callable[[Image.Image, random.Random], bytes]] = {
    "quality 30": lambda picture, rng: jpeg(picture, 30),
    "half size, quality 75": lambda picture, rng: jpeg(resized(picture, 0.5, 0.5), 75),
    "double size": lambda picture, rng: jpeg(resized(picture, 2, 2)),
    "15 % wider": lambda picture, rng: jpeg(resized(picture, 1.15, 1)),
    "darker, x 0.75": lambda picture, rng: jpeg(ImageEnhance.Brightness(picture).enhance(0.75)),
    "cropped by 5 %": lambda picture, rng: jpeg(cropped(picture, 0.05, rng)),
    "cropped by 10 %": lambda picture, rng: jpeg(cropped(picture, 0.1, rng)),
    "cropped by 10 %, half size, quality 30": lambda picture, rng: jpeg(
        resized(cropped(picture, 0.1, rng), 0.5, 0.5), 30
    ),
    "5 % of every edge cut off": lambda picture, rng: jpeg(
        picture.crop(
            (
                round(picture.width * 0.05),
                round(picture.height * 0.05),
                round(picture.width * 0.95),
                round(picture.height * 0.95),
            )
        )
    ),
    "cropped by 20 % (not asked for)": lambda picture, rng: jpeg(cropped(picture, 0.2, rng)),
}
