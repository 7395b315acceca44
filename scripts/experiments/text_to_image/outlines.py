"""How clean are the outlines? Each picture of one shape on white is compared with the shape that fits it best.

    python outlines.py DRAWINGS DATA --image-tokenizer FOLDER

It prints a table: the intersection over the union of the two areas, on average, for drawings, for real pictures of the
training split, and for these after the image tokenizer, which bounds what a model can draw with its codes.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from PIL import Image, ImageDraw

from m6.data.manifest import Manifest
from m6.data.pictures import decode_batch, to_bytes, to_unit_range
from m6.data.reader import open_split
from m6.data.sources.shapes import COLOURS, HELD_OUT, SHAPES, outline
from m6.errors import UserError
from m6.evaluation.pictures.captioned import CaptionedPictures, load_generated
from m6.tokenizers.image import load_image_tokenizer

NUM_REAL = 400
_OVERSAMPLING = 4
_STEPS = (0.03, 0.03, 0.03, 0.13)  # first steps of the search: right, down, radius, in shares of a side, and turn
_HALVINGS = 4
_MOST_TURN = 0.35  # the source turns by less
Place = tuple[float, float, float, float]
app = typer.Typer(add_completion=False)


@app.command()
def main(
    drawings: Annotated[Path, typer.Argument(help="folder that m6 generate --out-dir wrote")],
    data: Annotated[Path, typer.Argument(help="data folder of the run")],
    image_tokenizer: Annotated[Path, typer.Option(help="of the run")],
) -> None:
    """Prints the table."""
    tokenizer = load_image_tokenizer(image_tokenizer)
    drawn, _ = load_generated(drawings, tokenizer.image_size)
    drawn = drawn.where([_words(caption) is not None for caption in drawn.captions])
    if not len(drawn):
        raise UserError(f"{drawings} holds no picture of a caption such as 红色的圆形")
    is_new = [_words(caption) in HELD_OUT for caption in drawn.captions]
    real = _real(data, tokenizer.image_size)
    with torch.no_grad():
        again = tokenizer.decode(tokenizer.encode(to_unit_range(real.pixels, torch.device("cpu"))))
    print(f"| pictures | number | all | {' | '.join(SHAPES)} |\n| --- | ---: | ---: |{' ---: |' * len(SHAPES)}")
    for name, pictures in (
        ("drawn, seen in training", drawn.where([not new for new in is_new])),
        ("drawn, left out", drawn.where(is_new)),
        ("real", real),
        ("real, reconstructed", CaptionedPictures(to_bytes(again), real.captions)),
    ):
        print(f"| {name} | {len(pictures)} | {' | '.join(_row(pictures))} |")


def fit(area: np.ndarray, shape: str) -> float:
    """Returns the intersection over union of an area and the shape where it fits best.

    The place is searched for from the area's centre and size: one coordinate at a time, in ever smaller steps.

    Args:
        area: [H, H], how much of each pixel belongs to it, from 0 to 1.
        shape: one of ``SHAPES``.
    """
    side, total = len(area), float(area.sum())
    if total == 0:
        return 0.0
    unit = _render(shape, (0.5, 0.5, 0.4, 0.0), side)
    radius = 0.4 * math.sqrt(total / unit.sum())
    shift = (_centre(unit) - 0.5) * radius / 0.4  # a triangle's centre is not that of the circle around it
    right, down = _centre(area) - shift
    best: Place = (right, down, radius, 0.0)
    best_value, steps = _overlap(area, shape, best), _STEPS
    for _ in range(_HALVINGS):
        improved = True
        while improved:
            improved = False
            for index, step in enumerate(steps):
                for change in (step, -step):
                    moved = list(best)
                    moved[index] += change
                    place: Place = (moved[0], moved[1], moved[2], moved[3])
                    if abs(place[3]) <= _MOST_TURN and (value := _overlap(area, shape, place)) > best_value:
                        best, best_value, improved = place, value, True
        steps = (steps[0] / 2, steps[1] / 2, steps[2] / 2, steps[3] / 2)
    return best_value


def area_of(pixels: np.ndarray, colour: str) -> np.ndarray:
    """How far each of the pixels [H, H, 3] is on the way from white to the colour, from 0 to 1."""
    towards = np.array(COLOURS[colour]) - 255.0
    return np.clip((pixels - 255.0) @ towards / (towards @ towards), 0, 1)


def _overlap(area: np.ndarray, shape: str, place: Place) -> float:
    other = _render(shape, place, len(area))
    return float(np.minimum(area, other).sum() / np.maximum(area, other).sum())


def _render(shape: str, place: Place, side: int) -> np.ndarray:
    right, down, radius, turn = place
    fine = side * _OVERSAMPLING
    picture = Image.new("L", (fine, fine), 0)
    cos, sin = math.cos(turn), math.sin(turn)
    points = [
        (fine * (right + radius * (x * cos - y * sin)), fine * (down + radius * (x * sin + y * cos)))
        for x, y in outline(shape)
    ]
    ImageDraw.Draw(picture).polygon(points, fill=255)
    return np.asarray(picture.reduce(_OVERSAMPLING), dtype=float) / 255


def _centre(area: np.ndarray) -> np.ndarray:
    """The centre of an area, right and down, in shares of a side."""
    middles = (np.arange(len(area)) + 0.5) / len(area)
    return np.array([area.sum(axis=0) @ middles, area.sum(axis=1) @ middles]) / area.sum()


def _words(caption: str) -> tuple[str, str] | None:
    """Colour and shape of a caption that names no more than these."""
    colour, _, shape = caption.partition("的")
    return (colour, shape) if colour in COLOURS and shape in SHAPES else None


def _row(pictures: CaptionedPictures) -> list[str]:
    found: dict[str, list[float]] = defaultdict(list)
    for pixels, caption in zip(pictures.pixels, pictures.captions, strict=True):
        colour, shape = caption.split("的")
        found[shape].append(fit(area_of(pixels, colour), shape))
    values = [value for each in found.values() for value in each]
    return [f"{statistics.mean(each):.3f}" if each else "" for each in (values, *(found[shape] for shape in SHAPES))]


def _real(data: Path, side: int) -> CaptionedPictures:
    rows = open_split(Manifest.load(data), "shapes", "train")
    texts = rows.column("text")
    chosen = [number for number, caption in enumerate(texts) if _words(caption) is not None][:NUM_REAL]
    images = rows.column("image")
    pixels, good, _ = decode_batch([images[number] for number in chosen], side)
    return CaptionedPictures(pixels, [texts[chosen[place]] for place in good])


if __name__ == "__main__":
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
