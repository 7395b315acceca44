"""easy-VQA: 5,000 images of one coloured shape, with captions and questions in Chinese."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions, interleave
from m6.data.sources.packages import PipPackage
from m6.errors import UserError

PACKAGE = PipPackage("easy-vqa", "easy_vqa", "MIT")

COLOURS = {
    "black": "黑色",
    "blue": "蓝色",
    "brown": "棕色",
    "gray": "灰色",
    "green": "绿色",
    "red": "红色",
    "teal": "青色",
    "yellow": "黄色",
}
SHAPES = {"circle": "圆形", "rectangle": "长方形", "triangle": "三角形"}
ANSWERS = COLOURS | SHAPES | {"yes": "是", "no": "不是"}

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
    return "".join(COLOURS[c] + "的" for c in colour) + SHAPES.get(shape, "图形")


class _EasyVqa:
    """Base class. The package's test images are the test split; the build takes validation from its training part.

    The group of a row is its image, so all questions about an image are in one split.
    """

    own_splits: frozenset[Split] = frozenset({"test"})

    def __init__(self, options: SourceOptions) -> None:
        del options

    def origin(self) -> list[Origin]:
        """Returns the package, with a checksum of its questions and images."""
        folder = PACKAGE.folder() / "data"
        return [PACKAGE.origin(file for file in folder.rglob("*.*") if file.suffix in (".json", ".png"))]

    def _pictures(self) -> Iterator[tuple[str, bytes | None, list[tuple[str, str]], Split | None]]:
        """Yields (group, PNG bytes or None, English questions and answers, split) of every image."""
        folder = PACKAGE.folder() / "data"
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
    colours, shapes = facts & COLOURS.keys(), facts & SHAPES.keys()
    if len(colours) != 1 or len(shapes) != 1:
        return ""
    return f"{COLOURS[colours.pop()]}的{SHAPES[shapes.pop()]}"


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
