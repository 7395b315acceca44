"""Photographs of Debian packages, and altered copies of pictures as they occur on web pages.

They measure how copies of pictures are found. The photographs are from GCompris and desktop backgrounds.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image, ImageEnhance

from m6.data.sources.packages import DebianPackage

SIDE = 1024  # backgrounds of up to 20 megapixels are shrunk to this first
# Its resource files hold the pictures one after the other, as they are.
_GCOMPRIS = DebianPackage("gcompris-qt-data", "GPL-3.0-or-later")
_RESOURCES = r".*/rcc/(categorization|explore_\w+|details|erase)\.rcc"
_BACKGROUNDS = {
    DebianPackage("lomiri-wallpapers-16.04", "CC-BY-SA-3.0"): r".*/backgrounds/[^/]+\.jpg",
    DebianPackage("lomiri-wallpapers-20.04", "CC-BY-SA-4.0"): r".*/backgrounds/[^/]+\.jpg",
    DebianPackage("ukui-wallpapers", "CC-BY-SA-3.0"): r".*/backgrounds/[^/]+\.jpg",
    DebianPackage("mate-backgrounds", "CC-BY-SA-4.0"): r".*/mate/nature/[^/]+\.jpg",
}
# The same photograph in another activity, as one sees.
_AGAIN = {"6bdca75cceec99e8", "7713f85023b363cb", "9450ccaae4baf00e"}
_LEAST_BYTES, _LEAST_SIDE = 1000, 120


def photographs(cache: Path) -> Iterator[tuple[str, Image.Image]]:
    """Yields names and pictures, RGB, of different photographs and some paintings."""
    seen: set[str] = set()
    found = [(match[1], data) for match, content in _GCOMPRIS.members(cache, _RESOURCES) for data in _carved(content)]
    found += [
        (package.name, content)
        for package, pattern in _BACKGROUNDS.items()
        for _, content in package.members(cache, pattern)
    ]
    for name, data in found:
        digest = hashlib.sha256(data).hexdigest()
        if digest in seen or digest[:16] in _AGAIN:
            continue
        seen.add(digest)
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.draft("RGB", (2 * SIDE, 2 * SIDE))
                picture = image.convert("RGB")
        except OSError:
            continue  # bytes that look like the beginning of a picture
        if min(picture.size) >= _LEAST_SIDE:
            picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
            yield f"{name}-{digest[:8]}", picture


def backgrounds(cache: Path) -> Iterator[bytes]:
    """Yields the JPEG files of the desktop backgrounds as they are, most of them of several megapixels."""
    for package, pattern in _BACKGROUNDS.items():
        for _, content in package.members(cache, pattern):
            yield content


def _carved(content: bytes) -> Iterator[bytes]:
    """The WebP and JPEG files in a resource file: each follows its length."""
    end = 0
    for match in re.finditer(rb"RIFF....WEBP|\xff\xd8\xff[\xe0\xe1\xdb]", content, re.DOTALL):
        begin = match.start()
        if begin < max(end, 4):
            continue
        size = int.from_bytes(content[begin - 4 : begin], "big")
        if content[begin : begin + 4] == b"RIFF":
            size = int.from_bytes(content[begin + 4 : begin + 8], "little") + 8
        if _LEAST_BYTES <= size <= len(content) - begin:
            end = begin + size
            yield content[begin:end]


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
