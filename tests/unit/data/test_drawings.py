"""Drawings (SVG) whose elements refer to each other: a small file may stand for a billion elements."""

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from m6.data.sources.pictures import BadPicture, decode_here, encode

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
    monkeypatch.setattr("m6.data.sources.pictures.MAX_CALLS", 100_000)
    with pytest.raises(BadPicture, match="drawing too complex"):
        decode_here(BOMBS[kind], 32)
    assert sys.getprofile() is None


def test_a_large_drawing_with_references_is_drawn():
    used = '<use href="#a" transform="translate(4 4) rotate(30) scale(0.5)" style="fill:red;stroke:none"/>'
    picture = Image.open(io.BytesIO(encode(drawing(f'<path id="a" d="M0 0H8V8H0z"/>{used * 300}'), 32)))
    assert picture.size == (32, 32)
    assert picture.getpixel((20, 20)) == (255, 0, 0)


LONG = {
    "text": drawing(f"<text>{'m6 ' * 1_000_000}</text>"),
    "elements": drawing('<rect width="4" height="4"/>' * 200_000),
    "rules": drawing(f"<style>{'.a rect{{fill:red}}' * 5_000}</style>{'<rect class=`b`/>' * 20_000}".replace("`", '"')),
    "paths": drawing('<path d="M0 0h1v1z"/>' * 100_000),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", LONG)
def test_a_drawing_without_end_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("m6.data.sources.pictures.MAX_CALLS", 1_000_000)
    with pytest.raises(BadPicture, match="drawing too complex"):
        decode_here(LONG[kind], 32)


def test_calls_of_all_but_small_plain_drawings_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("m6.data.sources.pictures.MAX_CALLS", 0)
    rect = '<rect width="4" height="4"/>'
    decode_here(drawing(rect), 32)
    style = "style{}rect{{fill:red}}</{}style>"
    styles = [f"<{style.format('>', '')}", f"<s:{style.format(' >', 's:')}"]
    for content in (*(style + rect for style in styles), rect * 4000, f'<g id="a">{rect}</g><use href="#a"/>'):
        with pytest.raises(BadPicture, match="drawing too complex"):
            decode_here(drawing(content), 32)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('<!DOCTYPE svg [<!ENTITY a "b">]><svg xmlns="http://www.w3.org/2000/svg">&a;</svg>', "with entities"),
        ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><rect width="4"', "corrupt image"),
        ("<html><body>m6</body></html>", "corrupt image"),
        ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="a b c d"/>', "drawing that cairosvg cannot draw"),
    ],
)
def test_a_whole_drawing_is_not_called_corrupt(content: str, reason: str):
    with pytest.raises(BadPicture, match=reason):
        decode_here(content.encode(), 32)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_drawings_in_other_encodings(encoding: str):
    text = f'<?xml version="1.0" encoding="utf-16"?>{drawing("<rect width=`8` height=`8` fill=`red`/>").decode()}'
    if encoding == "utf-8-sig":
        text = text.replace("utf-16", "utf-8")
    picture = Image.open(io.BytesIO(encode(text.replace("`", '"').encode(encoding), 32)))
    assert picture.getcolors() == [(32 * 32, (255, 0, 0))]


REFERENCES = {
    "image": '<image href="{}" width="8" height="8"/>',
    "image of old": '<image xmlns:xlink="http://www.w3.org/1999/xlink" xlink:href="{}" width="8" height="8"/>',
    "use": '<use href="{}#a"/>',
    "style": '<style>@import url("{}");</style>',
    "fill": '<rect width="8" height="8" fill="url({}#a)"/>',
    "mask": '<rect width="8" height="8" mask="url({}#a)" fill="white"/>',
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", REFERENCES)
def test_a_drawing_opens_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secret = tmp_path / "secret.svg"
    secret.write_bytes(drawing('<g id="a"><rect width="8" height="8" fill="red"/></g>'))
    opened: list[str] = []
    watching = True
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if watching and event == "open" else None)
    for url in (secret.as_uri(), str(secret), "https://localhost:9/secret.svg"):
        data = drawing(REFERENCES[kind].format(url))
        with contextlib.suppress(BadPicture):
            assert decode_here(data, 32).picture.getcolors() == [(32 * 32, (255, 255, 255))]
    watching = False
    assert not [name for name in opened if "secret" in name]
