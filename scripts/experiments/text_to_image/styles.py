"""Are concept, style and colour combined? A judge of styles looks at drawings of captions such as 红色的鬼，剪影风格.

    python styles.py captions DATA > styles.txt             those that training showed, and some that it left out
    m6 generate --captions styles.txt --out-dir DRAWINGS ...
    python styles.py score DRAWINGS DATA PICTURES           PICTURES: the data folder of all emoji

The judge learns to tell styles apart, and colours of silhouettes, on real pictures of concepts that are not in DATA.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from m6.data.manifest import Manifest
from m6.data.pictures import decode_batch
from m6.data.reader import open_split
from m6.data.sources.drawings import NUM_SILHOUETTES, SILHOUETTE, colours, in_colour, left_out, styled
from m6.errors import UserError
from m6.evaluation.metrics import share
from m6.evaluation.pictures.captioned import CaptionedPictures, load_generated
from m6.evaluation.pictures.judge import Judge, JudgeSettings, train_judge

SOURCE = "emoji_styles"
CAPTION = re.compile(rf"(?:(?P<colour>\w+?)的(?=.+{SILHOUETTE}))?(?P<name>.+)，(?P<style>.+)风格")
app = typer.Typer(add_completion=False)
Data = Annotated[Path, typer.Argument(help="data folder of the run")]


@app.command()
def captions(data: Data) -> None:
    """Prints the captions of training, and for each concept the style and one colour that it left out."""
    rows = open_split(Manifest.load(data), SOURCE, "train")
    shown, names = dict.fromkeys(rows.column("text")), dict.fromkeys(rows.column("group"))
    new = [caption for name in names for caption in (styled(name, left_out(name)), _colour_left_out(name))]
    print("\n".join([*shown, *new]))


def _colour_left_out(name: str) -> str:
    return in_colour(name, colours(name)[NUM_SILHOUETTES])


@app.command()
def score(
    drawings: Annotated[Path, typer.Argument(help="folder that m6 generate --out-dir wrote")],
    data: Data,
    pictures: Annotated[Path, typer.Argument(help="data folder of all emoji")],
) -> None:
    """Prints a table: how often the judge finds the style that the caption names, and the colour of silhouettes."""
    settings = JudgeSettings()
    drawn, _ = load_generated(drawings, settings.image_size)
    real = _real(data, settings.image_size)
    shown = set(real.captions)
    names = {_name(caption) for caption in shown}
    others = _real(pictures, settings.image_size)
    others = others.where([_name(caption) not in names for caption in others.captions])
    looks = CaptionedPictures(others.pixels, [_look(caption) for caption in others.captions])
    judge = train_judge(looks, settings, torch.device("cpu"))
    print(
        "| captions | pictures | number | style | silhouettes | their colour |\n"
        "| --- | --- | ---: | ---: | ---: | ---: |"
    )
    for label, kind, group in (
        ("seen in training", "drawn", drawn.where([caption in shown for caption in drawn.captions])),
        ("", "real", real),
        ("left out", "drawn", drawn.where([caption not in shown for caption in drawn.captions])),
    ):
        print(f"| {label} | {kind} | {_row(judge, group)} |")


def _row(judge: Judge, pictures: CaptionedPictures) -> str:
    _, scores = judge.apply_to(pictures, torch.device("cpu"))
    looks = [_look(caption) for caption in pictures.captions]
    found = [judge.captions[best] for best in scores.argmax(dim=1).tolist()]
    styles = share([_style(look) == _style(other) for look, other in zip(looks, found, strict=True)])
    colours_found = [look == other for look, other in zip(looks, found, strict=True) if _style(look) == SILHOUETTE]
    return f"{len(looks)} | {styles} | {len(colours_found)} | {share(colours_found)}"


def _style(look: str) -> str:
    return SILHOUETTE if look.endswith(SILHOUETTE) else look


def _real(folder: Path, image_size: int) -> CaptionedPictures:
    rows = open_split(Manifest.load(folder), SOURCE, "train")
    pixels, good, _ = decode_batch(rows.column("image"), image_size)
    texts = rows.column("text")
    return CaptionedPictures(pixels, [texts[place] for place in good])


def _name(caption: str) -> str:
    return _parts(caption)["name"]


def _look(caption: str) -> str:
    """What the judge tells apart: 立体 of 购物车，立体风格, and 红色剪影 of 红色的鬼，剪影风格."""
    parts = _parts(caption)
    return (parts["colour"] or "") + parts["style"]


def _parts(caption: str) -> dict[str, str]:
    match = CAPTION.fullmatch(caption)
    if match is None:
        raise UserError(f'"{caption}" names no style; expected a caption such as 购物车，立体风格')
    return match.groupdict()


if __name__ == "__main__":
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
