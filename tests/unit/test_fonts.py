"""Chinese text in plots and grids has glyphs."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from fontTools.ttLib import TTFont
from PIL import Image

from m6.fonts import chinese_font
from m6.generation.grid import GAP, in_rows, picture_grid
from m6.plots.run import plot_run
from m6.plots.style import plotting
from tests.fixtures.fabricated_run import training_entry, write_metrics


def test_every_character_of_gb2312_has_a_glyph():
    rows = range(0xB0, 0xF8)
    text = "".join(bytes([row, cell]).decode("gb2312", "ignore") for row in rows for cell in range(0xA1, 0xFF))
    assert len(text) == 6763
    glyphs = TTFont(chinese_font()).getBestCmap()
    assert [char for char in f"{text}，。！？：；（）《》“”…—" if ord(char) not in glyphs] == []


def test_without_the_package_it_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "pylopdf_fonts_zh_cn", None)
    chinese_font.cache_clear()
    try:
        assert chinese_font() is None
        assert chinese_font() is None
        assert capsys.readouterr().err.count("pip install pylopdf-fonts-zh-cn") == 1
        picture_grid([[Image.new("RGB", (16, 16))]], ["红色的圆"])
    finally:
        monkeypatch.undo()
        chinese_font.cache_clear()


def test_a_plot_finds_all_glyphs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = tmp_path / "中文预训练"
    run.mkdir()
    write_metrics(run, [training_entry(step, {"language_modelling": 9.0}) for step in (1, 2)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Glyph")  # which matplotlib says of a glyph that it draws as a box
        plot_run(run)
        assert not caplog.records, "no word about fonts"
        with plotting() as pyplot:
            figure = pyplot.figure()
            figure.suptitle(chr(0xE123))  # in no font
            with pytest.raises(UserWarning, match="Glyph"):
                figure.savefig(tmp_path / "missing.png")


def caption_of(text: str, side: int = 64) -> np.ndarray:
    """The pixels at the left of a black picture."""
    grid = picture_grid([[Image.new("RGB", (side, side))] * 2], [text])
    assert grid.height == side
    return np.asarray(grid)[:, : grid.width - 2 * side - GAP]


def test_a_grid_shows_its_captions():
    circle, square, missing = caption_of("红色的圆"), caption_of("红色的方"), caption_of(chr(0xE123) * 4)
    assert circle.shape == square.shape
    for one, other in ((circle, square), (circle, missing), (circle, caption_of("    "))):
        assert one.shape != other.shape or (one != other).any()
    long = caption_of("一个红色的圆和一个绿色的三角形在蓝色的背景上，" * 9)
    assert long.shape[1] < 64 * 4, "a long caption is wrapped and cut"
    assert (long[[0, -1]] == 255).all(), "inside of its row"
    assert caption_of("https://" + "x" * 200).shape[1] < 64 * 4, "as is a long word"


def test_a_grid_without_captions_is_pictures_alone():
    colours = ["red", "green", "blue", "black", "white"]
    grid = picture_grid(in_rows([Image.new("RGB", (8, 8), colour) for colour in colours]))
    assert grid.size == (3 * 8 + 2 * GAP, 2 * 8 + GAP)
    corners = [grid.getpixel((column * (8 + GAP), row * (8 + GAP))) for row in range(2) for column in range(3)][:5]
    assert corners == [Image.new("RGB", (1, 1), colour).getpixel((0, 0)) for colour in colours]
