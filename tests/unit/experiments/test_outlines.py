"""How clean the outlines of drawn shapes are: known areas, and the table of a folder of drawings."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from m6.data.manifest import Manifest, Origin, SourceEntry, SplitEntry
from m6.data.shards import ShardWriter
from m6.data.sources.shapes import COLOURS, HELD_OUT, SHAPES, Figure, draw
from scripts.experiments.text_to_image import outlines

SIDE = 64


def picture(shape: str, angle: float = 0.2, radius: float = 0.3) -> np.ndarray:
    figure = Figure("红色", shape, 0.45, 0.55, radius, angle, COLOURS["红色"])
    image = Image.open(io.BytesIO(draw((255, 255, 255), [figure]))).resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(image)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_drawing_of_the_source_fits(shape: str):
    assert outlines.fit(outlines.area_of(picture(shape), "红色"), shape) > 0.97


def test_another_shape_and_rags_fit_worse():
    circle = outlines.area_of(picture("圆形"), "红色")
    whole = outlines.fit(circle, "圆形")
    assert outlines.fit(circle, "五角星") < 0.7
    ragged = circle.copy()
    ragged[::2] = np.roll(circle[::2], 6, axis=1)  # every second line is somewhere else
    assert outlines.fit(ragged, "圆形") < whole - 0.1
    # A circle inside of a square: pi / 4, and a little more with a square that leaves out its corners.
    assert 0.78 < outlines.fit(circle, "正方形") < 0.9
    assert outlines.fit(np.zeros((SIDE, SIDE)), "圆形") == 0.0


def test_how_far_a_pixel_is_from_white():
    pixels = np.array([[COLOURS["蓝色"], (255, 255, 255)]])
    assert outlines.area_of(pixels, "蓝色").tolist() == [[pytest.approx(1.0), 0.0]]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Drawings, of which one names two shapes, and a data folder."""
    drawings, data = tmp_path / "drawings", tmp_path / "data"
    drawings.mkdir()
    data.mkdir()
    captions = ["红色的圆形", "红色的五角星", "红色的圆形在红色的五角星的左边"]
    with (drawings / "captions.jsonl").open("w", encoding="utf-8") as file:
        for number, caption in enumerate(captions):
            Image.fromarray(picture("圆形")).save(drawings / f"{number}.png")
            file.write(json.dumps({"file": f"{number}.png", "caption": caption}) + "\n")
    with ShardWriter(data, "train", "shapes") as writer:
        for caption in captions:
            buffer = io.BytesIO()
            Image.fromarray(picture("圆形")).save(buffer, "PNG")
            row = {"id": caption, "group": caption, "text": caption, "image": buffer.getvalue()}
            writer.write({**row, "source": "shapes"})
    origin = Origin(package="tests", version="1", licence="Apache-2.0")
    splits = {"train": SplitEntry.of(writer.shards)}
    entry = SourceEntry(kind="image_text", licence="Apache-2.0", origin=[origin], splits=splits)
    Manifest(sources={"shapes": entry}).save(data)
    return drawings, data


def test_the_table(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    exact = SimpleNamespace(image_size=SIDE, encode=lambda pixels: pixels, decode=lambda codes: codes)
    monkeypatch.setattr(outlines, "load_image_tokenizer", lambda folder: exact)
    arguments = [*map(str, folders), "--image-tokenizer", "none"]
    lines = CliRunner().invoke(outlines.app, arguments, catch_exceptions=False).stdout.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    rows = {name: row for name, *row in cells}
    assert {name: row[0] for name, row in rows.items()} == {
        "drawn, seen in training": str(sum(("红色", shape) not in HELD_OUT for shape in ("圆形", "五角星"))),
        "drawn, left out": str(sum(("红色", shape) in HELD_OUT for shape in ("圆形", "五角星"))),
        "real": "2",
        "real, reconstructed": "2",
    }
    assert rows["real"] == rows["real, reconstructed"]
    everything, circle, *_, star, heart = rows["real"][1:]
    assert float(circle) > 0.97 > 0.7 > float(star)
    assert float(everything) == pytest.approx((float(circle) + float(star)) / 2, abs=1e-3)
    assert heart == ""
