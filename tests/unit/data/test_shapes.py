"""The source of coloured shapes: what is drawn, what the captions say, what is kept out of training."""

import collections
import io
import itertools

import numpy as np
import pytest
from PIL import Image

from m6.data.build import BuildSettings, build
from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.data.sources import SourceOptions, shapes
from m6.training.tokenizers.text import train_text_tokenizer


@pytest.fixture(scope="module")
def drawings():
    """The first rows, with what they show."""
    rows = itertools.islice(shapes.Shapes(SourceOptions(cache=None)).rows(), 600)
    return [(row, *shapes.compose(np.random.default_rng(number))[1:]) for number, row in enumerate(rows)]


def test_shapes_are_drawn_in_their_colours_where_they_are(drawings):
    for row, background, figures in drawings:
        pixels = np.asarray(Image.open(io.BytesIO(row.image)).convert("RGB"))
        assert pixels.shape == (shapes.SIDE, shapes.SIDE, 3)
        assert tuple(pixels[0, 0]) == background
        for figure in figures:
            x, y = (round(value * shapes.SIDE) for value in (figure.x, figure.y))
            assert tuple(pixels[y, x]) == figure.fill, row.text
            expected = np.array(shapes.COLOURS[figure.colour])
            assert np.abs(np.array(figure.fill) - expected).max() <= 12


def test_captions_of_shapes_say_what_is_drawn(drawings):
    kinds = collections.Counter()
    for row, background, figures in drawings:
        for figure in figures:
            assert figure.colour in row.text
            assert figure.shape in row.text
        if relation := next((word for word in shapes.RELATIONS if row.text.endswith(f"的{word}")), None):
            behind, front = figures
            right, down = shapes.RELATIONS[relation]
            # The first-named figure is on the side that the caption says, and touches the other at most.
            distance = (front.x - behind.x) * right + (front.y - behind.y) * down
            assert distance > front.radius + behind.radius - 0.04
            assert row.text == f"{front.name}在{behind.name}的{relation}"
        elif "背景" in row.text:
            colour = row.text.split("，")[1].removesuffix("的背景")
            assert np.abs(np.array(background) - np.array(shapes.COLOURS[colour])).max() <= 12
            assert colour != figures[0].colour
        elif place := next((word for word in shapes.PLACES if row.text.startswith(word)), None):
            assert np.abs(np.array(shapes.PLACES[place]) - (figures[0].x, figures[0].y)).max() <= 0.02
        elif size := next((size for size in shapes.SIZES if f"的{size}" in row.text), None):
            smallest, largest = shapes.SIZES[size]
            assert smallest <= figures[0].radius <= largest
        kinds[len(figures), "背景" in row.text, any(map(row.text.startswith, shapes.PLACES))] += 1
    assert len(kinds) == 4


def test_shapes_differ_by_more_than_their_colour():
    """Each outline covers a share of its circle that no other one does."""
    areas = {}
    for shape in shapes.SHAPES:
        corners = np.array(shapes.outline(shape))
        assert np.linalg.norm(corners, axis=1).max() <= 1.16
        after = np.roll(corners, -1, axis=0)
        areas[shape] = abs(np.sum(corners[:, 0] * after[:, 1] - after[:, 0] * corners[:, 1])) / 2 / np.pi
    assert areas["圆形"] == pytest.approx(1, abs=0.01)
    assert areas["正方形"] == pytest.approx(2 / np.pi)
    assert areas["三角形"] == pytest.approx(3 * 3**0.5 / 4 / np.pi)
    ordered = sorted(areas.values())
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 0.02


def test_shapes_stand_upright(drawings):
    """Each is its own mirror image, turned by 15 degrees at most: a triangle that lies in any way is many shapes."""
    for shape in shapes.SHAPES:
        corners = np.array(shapes.outline(shape))
        mirrored = corners * (-1, 1)
        assert np.linalg.norm(corners[:, None] - mirrored[None], axis=2).min(axis=1).max() < 1e-9
    top = min(shapes.outline("三角形"), key=lambda corner: corner[1])
    assert top == pytest.approx((0, -1))
    angles = [figure.angle for *_, figures in drawings for figure in figures]
    assert max(map(abs, angles)) <= np.pi / 12
    assert np.std(angles) == pytest.approx(np.pi / 12 / 3**0.5, rel=0.1)


def test_held_out_combinations_of_shapes_are_never_trained_on(drawings):
    assert len(shapes.HELD_OUT) == 12
    for row, _, figures in drawings:
        held_out = any((figure.colour, figure.shape) in shapes.HELD_OUT for figure in figures)
        assert held_out == (row.split in ("validation", "test"))
    trained = {(f.colour, f.shape) for row, _, figures in drawings if row.split is None for f in figures}
    assert trained == set(itertools.product(shapes.COLOURS, shapes.SHAPES)) - shapes.HELD_OUT


def test_a_row_of_shapes_depends_on_its_number_alone(drawings):
    again = list(itertools.islice(shapes.Shapes(SourceOptions(cache=None)).rows(), 20))
    assert again == [row for row, *_ in drawings[:20]]


def test_held_out_combinations_have_no_piece_that_training_lacks(tmp_path, drawings):
    """Else the captions could not be composed: the model would have never seen a piece of them."""
    build([shapes.Shapes(SourceOptions(cache=None))], tmp_path / "data", BuildSettings(image_size=8, limit=1500))
    manifest = Manifest.load(tmp_path / "data")
    seen, pieces = open_split(manifest, "shapes", "train").column("text"), {}
    for length, size in ((2, 300), (16, 500)):
        tokenizer = train_text_tokenizer(
            manifest, tmp_path / f"tokenizer_{length}", size, image_vocab_size=8, max_piece_length=length
        )
        trained = {piece for caption in set(seen) for piece in tokenizer.encode_ids(caption)}
        unseen = [f"{colour}的{shape}" for colour, shape in shapes.HELD_OUT]
        pieces[length] = [
            piece for caption in unseen for piece in tokenizer.encode_ids(caption) if piece not in trained
        ]
    assert pieces[2] == []
    assert pieces[16], "long pieces would hold whole captions, and this test would show nothing"
