"""Drawings (SVG) whose elements refer to each other: a small file may stand for a billion elements."""

import io
import sys
from collections.abc import Callable

import pytest
from PIL import Image

from m6.data.sources.pictures import BadPicture, encode

pytest.importorskip("cairosvg")

USE = '<use href="#a{}"/>'
RECT = '<rect width="8" height="8" {}/>'
PATTERN = '<pattern id="a{}" width="1" height="1">{}</pattern>'


def drawing(content: str) -> bytes:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8">{content}</svg>'.encode()


def nested(element: str, reference: Callable[[int], str], head: str = "") -> bytes:
    """Nine levels of definitions, each of which has ten references to the one before."""
    levels = "".join(element.format(level, reference(level - 1) * 10) for level in range(1, 10))
    return drawing(f"{head}<defs>{levels}</defs>{reference(9)}")


STYLE = "".join(f".b{level} {{fill: u\\72l(#a{level})}} " for level in range(10))
BOMBS = {
    "use": nested('<g id="a{}">{}</g>', USE.format),
    "pattern": nested(PATTERN, lambda level: RECT.format(f'fill="url(#a{level})"')),
    "entities": nested(PATTERN, lambda level: RECT.format(f'fill="&#117;rl(#a{level})"')),
    "style": nested(PATTERN, lambda level: RECT.format(f'class="b{level}"'), f"<style>{STYLE}</style>"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", BOMBS)
def test_references_that_multiply_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("m6.data.sources.pictures._CALLS", 100_000)
    with pytest.raises(BadPicture, match="drawing too complex"):
        encode(BOMBS[kind], 32)
    assert sys.getprofile() is None


def test_a_large_drawing_with_references_is_drawn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("m6.data.sources.pictures._CALLS", 0)  # what is left grows with the file
    used = '<use href="#a" transform="translate(4 4) rotate(30) scale(0.5)" style="fill:red;stroke:none"/>'
    picture = Image.open(io.BytesIO(encode(drawing(f'<path id="a" d="M0 0H8V8H0z"/>{used * 50}'), 32)))
    assert picture.size == (32, 32)
    assert picture.getpixel((20, 20)) == (255, 0, 0)
