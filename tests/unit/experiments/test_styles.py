"""Captions that name a style: which are asked for, and how often a judge of styles finds what they name."""

import io

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from m6.data.manifest import Manifest, Origin, SourceEntry, SplitEntry
from m6.data.shards import ShardWriter
from m6.data.sources.drawings import NUM_SILHOUETTES, WORDS, colours, in_colour, left_out, styled
from m6.data.sources.shapes import COLOURS
from m6.evaluation.pictures.judge import JudgeSettings
from m6.generation.grid import write_pictures
from scripts.experiments.text_to_image import styles

NAMES, OTHERS = ("鬼", "巴西的旗帜"), tuple("甲乙丙丁戊己庚辛壬癸")


def picture(caption):
    """Each style has stripes of its own; a silhouette is filled with its colour."""
    pixels = np.full((16, 16, 3), 255, np.uint8)
    for period, word in enumerate(WORDS.values(), start=2):
        if word in caption:
            pixels[::period] = (0, 80, 160)
    for colour, rgb in COLOURS.items():
        if caption.startswith(f"{colour}的"):
            pixels[2:14, 2:14] = rgb
    return Image.fromarray(pixels)


def captions_of(name):
    shown = [styled(name, style) for style in WORDS if style != left_out(name)]
    return [*shown, *(in_colour(name, colour) for colour in colours(name)[:NUM_SILHOUETTES])]


def write_data(folder, names):
    folder.mkdir()
    with ShardWriter(folder, "train", "emoji_styles") as writer:
        for name in names:
            for caption in captions_of(name):
                buffer = io.BytesIO()
                picture(caption).save(buffer, "PNG")
                row = {"id": caption, "group": name, "text": caption, "image": buffer.getvalue()}
                writer.write({**row, "source": "emoji_styles"})
    origin = Origin(package="tests", version="1", licence="Apache-2.0")
    splits = {"train": SplitEntry.of(writer.shards)}
    entry = SourceEntry(kind="image_text", licence="Apache-2.0", origin=[origin], splits=splits)
    Manifest(sources={"emoji_styles": entry}).save(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data", NAMES)


def run(*arguments):
    result = CliRunner().invoke(styles.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_captions_are_those_of_training_and_two_new_ones_of_each_concept(data):
    found = run("captions", data)
    shown = [caption for name in NAMES for caption in captions_of(name)]
    assert found[: len(shown)] == shown
    new = found[len(shown) :]
    assert new == [
        caption
        for name in NAMES
        for caption in (styled(name, left_out(name)), in_colour(name, colours(name)[NUM_SILHOUETTES]))
    ]
    assert not set(new) & set(shown)


def test_what_the_judge_finds(tmp_path, data, monkeypatch):
    monkeypatch.setattr(
        styles, "JudgeSettings", lambda: JudgeSettings(image_size=16, channels=[16, 32], total_steps=300)
    )
    everything = write_data(tmp_path / "everything", NAMES + OTHERS)
    captions = run("captions", data)
    new = [caption for caption in captions if caption not in {c for name in NAMES for c in captions_of(name)}]
    # The drawings are right, but one that was left out has the stripes of another style.
    wrong = next(caption for caption in new if "剪影" not in caption)
    other = next(word for word in WORDS.values() if word not in wrong)
    pictures = [picture(f"鬼，{other}风格" if caption == wrong else caption) for caption in captions]
    write_pictures(pictures, captions, tmp_path / "drawings")
    rows = [line.strip("| ").split(" | ") for line in run("score", tmp_path / "drawings", data, everything)[-3:]]
    assert [row[-5:-3] for row in rows] == [["drawn", str(2 * 7)], ["real", str(2 * 7)], ["drawn", "4"]]
    assert [row[-3].split("%")[0].strip() for row in rows] == ["100.0", "100.0", "75.0"]
    assert [row[-2] for row in rows] == ["6", "6", "2"]
