"""A quiz for people: drawings without labels, five captions each.

    python quiz.py ask runs/text_to_image/masked QUIZ       writes QUIZ/quiz.png, QUIZ/questions.md and QUIZ/key.json
    python quiz.py score QUIZ answers.txt                   each line of the answers: a number and a letter, such as 7 C

Who answers looks at the picture and the questions alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image, ImageDraw, ImageFont

from m6.errors import UserError
from m6.evaluation.metrics import share
from m6.evaluation.pictures.captioned import load_generated
from m6.files import read_lines, write_json, write_text
from m6.validation import read_document

NUM_DRAWINGS, NUM_CHOICES, COLUMNS = 40, 5, 8
SIDE = 128  # pixels of a drawing in the quiz
LETTERS = "ABCDE"
app = typer.Typer(add_completion=False)


@app.command()
def ask(
    drawings: Annotated[Path, typer.Argument(help="folder that m6 generate --out-dir wrote")],
    out: Annotated[Path, typer.Argument(help="folder of the quiz")],
    seed: Annotated[int, typer.Option(help="of the choice of drawings and captions")] = 0,
) -> None:
    """Chooses drawings and captions at random."""
    pictures, _ = load_generated(drawings, SIDE)
    captions = sorted(set(pictures.captions))
    if len(pictures) < NUM_DRAWINGS or len(captions) < NUM_CHOICES:
        raise UserError(
            f"{drawings}: {len(pictures)} drawings of {len(captions)} captions; a quiz needs {NUM_DRAWINGS} and "
            f"{NUM_CHOICES}"
        )
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(pictures), size=NUM_DRAWINGS, replace=False).tolist()
    questions, key = [], {}
    for number, index in enumerate(chosen, start=1):
        right = pictures.captions[index]
        others = rng.choice([caption for caption in captions if caption != right], NUM_CHOICES - 1, replace=False)
        choices = rng.permutation([right, *others]).tolist()
        questions.append(f"{number}. " + ", ".join(map(" ".join, zip(LETTERS, choices, strict=True))))
        key[str(number)] = {"answer": LETTERS[choices.index(right)], "caption": right}
    out.mkdir(parents=True, exist_ok=True)
    _sheet(pictures.pixels[chosen]).save(out / "quiz.png")
    write_text(out / "questions.md", "Which caption belongs to the drawing?\n\n" + "\n".join(questions) + "\n")
    write_json(out / "key.json", key)


def _sheet(pixels: np.ndarray) -> Image.Image:
    """Puts numbered drawings uint8 [N, SIDE, SIDE, 3] on one picture."""
    margin, label = 8, 20
    width, height = SIDE + margin, SIDE + margin + label
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(pixels) // COLUMNS) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, picture in enumerate(pixels):
        left, top = index % COLUMNS * width, index // COLUMNS * height
        draw.text((left + 2, top + 2), str(index + 1), fill="black", font=ImageFont.load_default(16))
        sheet.paste(Image.fromarray(picture), (left, top + label))
    return sheet


@app.command()
def score(
    quiz: Annotated[Path, typer.Argument(help="folder of the quiz")],
    answers: Annotated[Path, typer.Argument(help="text file with the answers")],
) -> None:
    """Counts the right answers."""
    key = read_document(quiz / "key.json")
    given = {}
    for number, line in enumerate(read_lines(answers), start=1):
        if line.strip():
            match = re.fullmatch(rf"\s*(\d+)\s+([{LETTERS}])\s*", line, re.IGNORECASE)
            if match is None:
                raise UserError(
                    f'{answers}:{number}: expected a number and a letter, such as "7 C", found "{line[:40]}"'
                )
            given[match[1]] = match[2]
    if given.keys() != key.keys():
        missing = sorted(key.keys() ^ given.keys(), key=int)
        raise UserError(f"{answers}: expected one answer for each of 1 to {len(key)}; missing or unknown: {missing}")
    hits = [given[number].upper() == entry["answer"] for number, entry in key.items()]
    wrong = [f"{n} ({entry['caption']})" for (n, entry), hit in zip(key.items(), hits, strict=True) if not hit]
    print(f"{sum(hits)} of {len(hits)}: {share(hits)}; wrong: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
