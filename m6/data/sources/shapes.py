"""Coloured shapes: drawn by this module, with captions composed of words; and easy-VQA.

easy-VQA has 5,000 images of one coloured shape, with captions and questions in Chinese.
"""

import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageDraw

import m6
from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions, interleave
from m6.data.sources.packages import PipPackage
from m6.errors import UserError

T = TypeVar("T")
Rgb = tuple[int, int, int]

COLOURS: dict[str, Rgb] = {
    "红色": (220, 30, 35),
    "橙色": (250, 140, 20),
    "黄色": (245, 215, 30),
    "绿色": (40, 160, 60),
    "青色": (30, 180, 190),
    "蓝色": (35, 70, 220),
    "紫色": (135, 50, 180),
    "粉色": (250, 150, 190),
    "棕色": (130, 80, 40),
    "灰色": (130, 130, 130),
    "黑色": (25, 25, 25),
}
SHAPES = ("圆形", "三角形", "正方形", "长方形", "五角星", "心形")
SIZES = {"大": (0.34, 0.42), "小": (0.14, 0.20)}  # radius as a share of the image's side
PLACES = {
    "左上角": (0.27, 0.27),
    "右上角": (0.73, 0.27),
    "左下角": (0.27, 0.73),
    "右下角": (0.73, 0.73),
    "中间": (0.5, 0.5),
}
RELATIONS = {"左边": (-1, 0), "右边": (1, 0), "上面": (0, -1), "下面": (0, 1)}

NUM_ROWS = 60_000
SIDE = 128  # pixels
_OVERSAMPLING = 4  # drawn at this many times the side and averaged, for smooth outlines
_SHARES = (0.5, 0.125, 0.125, 0.25)  # of captions with: only the shape, its size or place, a background, two shapes


def _held_out() -> frozenset[tuple[str, str]]:
    """Two colours of each shape. Every colour and every shape also occurs in other combinations."""
    colours = list(COLOURS)
    return frozenset((colours[(2 * n + k) % len(colours)], shape) for n, shape in enumerate(SHAPES) for k in (0, 1))


HELD_OUT = _held_out()
"""Combinations of colour and shape without training rows."""


class Figure(NamedTuple):
    """A shape in an image; lengths are shares of the image's side.

    Attributes:
        colour, shape: keys of COLOURS, and one of SHAPES.
        x, y: centre.
        radius: radius of the circumscribed circle.
        angle: rotation in radians.
        fill: shade of the colour: red, green and blue.
    """

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    angle: float
    fill: Rgb

    @property
    def name(self) -> str:
        """The words for the figure, such as 红色的圆形."""
        return f"{self.colour}的{self.shape}"


class Shapes:
    """One row for each drawing: a shape, at times with its size, its place or a background, or two shapes.

    Rows with a combination of HELD_OUT are in the test split and in the validation split, where a judge can learn them.
    """

    name = "shapes"
    kind: SourceKind = "image_text"
    own_splits: frozenset[Split] = frozenset()

    def __init__(self, options: SourceOptions) -> None:
        del options

    def origin(self) -> list[Origin]:
        """Returns this project as the origin: it draws the shapes."""
        return [Origin(package="m6-recipes", version=m6.__version__, licence="Apache-2.0")]

    def rows(self) -> Iterator[Row]:
        """Yields the drawings. Each depends only on its number."""
        for number in range(NUM_ROWS):
            caption, background, figures = compose(np.random.default_rng(number))
            held_out: Split | None = None
            if any((figure.colour, figure.shape) in HELD_OUT for figure in figures):
                held_out = "validation" if number % 2 else "test"
            yield Row(f"shapes/{number}", f"shapes/{number}", caption, draw(background, figures), split=held_out)


def compose(rng: np.random.Generator) -> tuple[str, Rgb, list[Figure]]:
    """Samples a caption, and everything left open by it.

    Returns:
        The caption, the colour of the background, and the figures from back to front.
    """
    kind = rng.choice(4, p=_SHARES)
    background = (255, 255, 255)
    if kind == 3:
        relation, (right, down) = _one_of(RELATIONS, rng)
        first, second = (
            _figure(rng, (0.14, 0.22), (0.5 + side * 0.25 * right, 0.5 + side * 0.25 * down), 0.04) for side in (1, -1)
        )
        return f"{first.name}在{second.name}的{relation}", background, [second, first]
    if kind == 2:
        colour, background = _one_of(COLOURS, rng)
        figure = _figure(rng, (0.2, 0.38), (0.5, 0.5), 0.08, without=colour)
        return f"{figure.name}，{colour}的背景", _near(background, rng), [figure]
    if kind == 1 and rng.random() < 0.5:
        size, radius = _one_of(SIZES, rng)
        figure = _figure(rng, radius, (0.5, 0.5), 0.08)
        return f"{figure.colour}的{size}{figure.shape}", background, [figure]
    if kind == 1:
        place, centre = _one_of(PLACES, rng)
        figure = _figure(rng, (0.14, 0.24), centre, 0.02)
        return f"{place}的{figure.name}", background, [figure]
    figure = _figure(rng, (0.2, 0.42), (0.5, 0.5), 0.08)
    return figure.name, background, [figure]


def draw(background: Rgb, figures: list[Figure]) -> bytes:
    """Draws figures as a PNG file of SIDE x SIDE pixels."""
    side = SIDE * _OVERSAMPLING
    picture = Image.new("RGB", (side, side), background)
    canvas = ImageDraw.Draw(picture)
    for figure in figures:
        points = [
            (
                side * (figure.x + figure.radius * (x * math.cos(figure.angle) - y * math.sin(figure.angle))),
                side * (figure.y + figure.radius * (x * math.sin(figure.angle) + y * math.cos(figure.angle))),
            )
            for x, y in outline(figure.shape)
        ]
        canvas.polygon(points, fill=figure.fill)
    buffer = io.BytesIO()
    picture.reduce(_OVERSAMPLING).save(buffer, "PNG")
    return buffer.getvalue()


def _figure(
    rng: np.random.Generator,
    radius: tuple[float, float],
    centre: tuple[float, float],
    shift: float,
    without: str | None = None,
) -> Figure:
    """A figure of any colour but ``without``. Its centre is ``centre``, moved by up to ``shift`` on each axis."""
    colour = str(rng.choice([colour for colour in COLOURS if colour != without]))
    shape = str(rng.choice(SHAPES))
    x, y = (float(value + rng.uniform(-shift, shift)) for value in centre)
    angle = float(rng.uniform(-math.pi / 12, math.pi / 12))  # upright, more or less
    return Figure(colour, shape, x, y, float(rng.uniform(*radius)), angle, _near(COLOURS[colour], rng))


def outline(shape: str) -> list[tuple[float, float]]:
    """The corners of a shape of SHAPES in the circle of radius 1 around (0, 0); y points down."""
    if shape == "五角星":
        radii = [1.0, 0.42] * 5
        angles = [math.pi * n / 5 - math.pi / 2 for n in range(10)]
    elif shape == "心形":
        turns = [2 * math.pi * n / 64 for n in range(64)]
        return [
            (
                math.sin(t) ** 3,
                -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 17 - 0.1,
            )
            for t in turns
        ]
    elif shape == "长方形":
        angles, radii = [math.pi * n + turn for n in (0, 1) for turn in (-0.42, 0.42)], [1.0] * 4
    else:
        corners = {"圆形": 96, "三角形": 3, "正方形": 4}[shape]
        first = math.pi / 4 if shape == "正方形" else -math.pi / 2
        angles = [2 * math.pi * n / corners + first for n in range(corners)]
        radii = [1.0] * corners
    return [(radius * math.cos(angle), radius * math.sin(angle)) for radius, angle in zip(radii, angles, strict=True)]


def _near(colour: Rgb, rng: np.random.Generator) -> Rgb:
    """A shade of a colour."""
    red, green, blue = (int(np.clip(value + rng.integers(-12, 13), 0, 255)) for value in colour)
    return red, green, blue


def _one_of(choices: Mapping[str, T], rng: np.random.Generator) -> tuple[str, T]:
    return list(choices.items())[rng.integers(len(choices))]


EASY_VQA = PipPackage("easy-vqa", "easy_vqa", "MIT")

EASY_VQA_COLOURS = {
    "black": "黑色",
    "blue": "蓝色",
    "brown": "棕色",
    "gray": "灰色",
    "green": "绿色",
    "red": "红色",
    "teal": "青色",
    "yellow": "黄色",
}
EASY_VQA_SHAPES = {"circle": "圆形", "rectangle": "长方形", "triangle": "三角形"}
ANSWERS = EASY_VQA_COLOURS | EASY_VQA_SHAPES | {"yes": "是", "no": "不是"}

# The subject of a question, such as "blue shape", "circle" or "shape".
_THING = r"((?:\w+ )?(?:shape|circle|rectangle|triangle))"
# Yes-no questions are translated with 是不是, to make the answers 是 and 不是 unambiguous for negated questions.
QUESTIONS = tuple(
    (re.compile(pattern.replace("THING", _THING)), translation)
    for pattern, translation in (
        (r"what is the THING\?", "{}是什么形状？"),
        (r"what colou?r is the THING\?", "{}是什么颜色？"),
        (r"what is the colou?r of the THING\?", "{}的颜色是什么？"),
        (r"what shape does the image contain\?", "图片包含什么形状？"),
        (r"what shape is in the image\?", "图片里有什么形状？"),
        (r"what shape is present\?", "这是什么形状？"),
        (r"does the image contain a THING\?", "图片是不是包含{}？"),
        (r"does the image not contain a THING\?", "图片是不是不包含{}？"),
        (r"is there a THING in the image\?", "图片里是不是有{}？"),
        (r"is there not a THING in the image\?", "图片里是不是没有{}？"),
        (r"is there a THING\?", "这里是不是有{}？"),
        (r"is there not a THING\?", "这里是不是没有{}？"),
        (r"is a THING present\?", "{}是不是出现了？"),
        (r"is no THING present\?", "{}是不是没有出现？"),
    )
)


def translate_question(question: str) -> str:
    """Translates an easy-VQA question to Chinese; UserError for a question not in version 1.0."""
    for pattern, translation in QUESTIONS:
        match = pattern.fullmatch(question)
        if match:
            return translation.format(*(_translate_thing(thing) for thing in match.groups()))
    raise UserError(f'easy-vqa: there is no translation for the question "{question}"; expected version 1.0')


def _translate_thing(thing: str) -> str:
    *colour, shape = thing.split()
    return "".join(EASY_VQA_COLOURS[c] + "的" for c in colour) + EASY_VQA_SHAPES.get(shape, "图形")


class _EasyVqa:
    """Base class. The package's test images are the test split; the build takes validation from its training part.

    The group of a row is its image, so all questions about an image are in one split.
    """

    own_splits: frozenset[Split] = frozenset({"test"})

    def __init__(self, options: SourceOptions) -> None:
        del options

    def origin(self) -> list[Origin]:
        """Returns the package, with a checksum of its questions and images."""
        folder = EASY_VQA.folder() / "data"
        return [EASY_VQA.origin(file for file in folder.rglob("*.*") if file.suffix in (".json", ".png"))]

    def _pictures(self) -> Iterator[tuple[str, bytes | None, list[tuple[str, str]], Split | None]]:
        """Yields (group, PNG bytes or None, English questions and answers, split) of every image."""
        folder = EASY_VQA.folder() / "data"
        splits: dict[str, Split | None] = {"train": None, "test": "test"}
        parts = []
        for part in splits:
            questions: dict[int, list[tuple[str, str]]] = {}
            for question, answer, picture in json.loads((folder / part / "questions.json").read_bytes()):
                questions.setdefault(picture, []).append((question, answer))
            parts.append([(part, picture, pairs) for picture, pairs in sorted(questions.items())])
        for part, picture, pairs in interleave(*parts):
            image = _read(folder / part / "images" / f"{picture}.png")
            yield f"easy_vqa/{part}/{picture}", image, pairs, splits[part]


class EasyVqaCaptions(_EasyVqa):
    """Images with a caption such as 蓝色的圆形, derived from the questions and answers.

    One image in nine is left out, because its questions do not determine both the colour and the shape.
    """

    name = "easy_vqa"
    kind: SourceKind = "image_text"

    def rows(self) -> Iterator[Row]:
        """Yields one row for each image with a known caption."""
        for group, image, pairs, split in self._pictures():
            caption = _caption(pairs)
            if caption:
                yield Row(group, group, caption, image, split=split)


class EasyVqaQuestions(_EasyVqa):
    """The same images and split, with questions and answers instead of captions."""

    name = "easy_vqa_questions"
    kind: SourceKind = "vqa"

    def rows(self) -> Iterator[Row]:
        """Yields one row for each question."""
        for group, image, pairs, split in self._pictures():
            for number, (question, answer) in enumerate(pairs):
                yield Row(
                    f"{group}/{number}",
                    group,
                    image=image,
                    question=translate_question(question),
                    answer=ANSWERS[answer],
                    split=split,
                )


def _caption(pairs: list[tuple[str, str]]) -> str:
    """Returns a caption such as 蓝色的圆形; empty if the questions do not determine the colour and the shape."""
    facts = {answer for _, answer in pairs}
    for question, answer in pairs:
        negated = " not " in question or " no " in question
        # The words of a question are facts unless the answer denies it: by "what is the blue shape?" the shape is blue.
        if answer not in ("yes", "no") or answer == ("no" if negated else "yes"):
            facts.update(re.findall(r"\w+", question))
    colours, shapes = facts & EASY_VQA_COLOURS.keys(), facts & EASY_VQA_SHAPES.keys()
    if len(colours) != 1 or len(shapes) != 1:
        return ""
    return f"{EASY_VQA_COLOURS[colours.pop()]}的{EASY_VQA_SHAPES[shapes.pop()]}"


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
