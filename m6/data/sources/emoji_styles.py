"""Emoji again, with captions that name concept and style, and those of silhouettes a colour."""

import hashlib
import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

from m6.data.sources.base import Row
from m6.data.sources.emoji import STYLES, Emoji, read_emoji
from m6.data.sources.shapes import COLOURS, Rgb

# The words for the styles of the source "emoji".
WORDS = {"noto": "谷歌", "twemoji": "推特", "openmoji": "描边", "fluent-3d": "立体", "fluent-flat": "扁平"}
SILHOUETTE = "剪影"
NUM_SILHOUETTES = 3  # of each emoji, each in another colour


class EmojiStyles(Emoji):
    """One row for each emoji and style, as 雨伞，描边风格, and for its silhouettes, as 红色的雨伞，剪影风格.

    One style of each emoji (``left_out``) and most colours of its silhouette have no row: what a model draws for those
    captions shows whether it composes concept, style and colour. Emoji are in the order of the source "emoji".
    """

    name = "emoji_styles"

    def rows(self) -> Iterator[Row]:
        """Yields the pictures of one emoji after the other."""
        for code, name, pictures in read_emoji(self.cache):
            for style, image in pictures.items():
                if style != left_out(name):
                    yield Row(f"{self.name}/{code}/{style}", name, styled(name, style), image)
            for colour in colours(name)[:NUM_SILHOUETTES]:
                image = silhouette(pictures["noto"], COLOURS[colour])
                yield Row(f"{self.name}/{code}/{colour}", name, in_colour(name, colour), image)


def styled(name: str, style: str) -> str:
    """The caption of an emoji in a style of ``WORDS``."""
    return f"{name}，{WORDS[style]}风格"


def in_colour(name: str, colour: str) -> str:
    """The caption of an emoji's silhouette."""
    return f"{colour}的{name}，{SILHOUETTE}风格"


def left_out(name: str) -> str:
    """The style that no row of an emoji has."""
    return str(_of_its_own(name).choice(list(STYLES)))


def colours(name: str) -> list[str]:
    """All colours in an order of the emoji's own: its silhouettes have the first NUM_SILHOUETTES."""
    return [str(colour) for colour in _of_its_own(name).permutation(list(COLOURS))]


def silhouette(image: bytes, colour: Rgb) -> bytes:
    """Fills what a picture does not leave transparent with one colour, as a PNG file on white."""
    opaque = Image.open(io.BytesIO(image)).convert("RGBA").getchannel("A")
    picture = Image.new("RGB", opaque.size, (255, 255, 255))
    picture.paste(colour, mask=opaque)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _of_its_own(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
