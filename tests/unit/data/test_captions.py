"""The record of training captions: what it holds, what it warns of, and how its file is read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m6.data.captions import SeenCaptions, describe_captions
from m6.errors import UserError
from m6.runs.data import keep_captions, kept_captions, write_captions
from m6.runs.directory import CAPTIONS
from m6.tokenizers.text import M6Tokenizer, load_text_tokenizer

MODEL = Path(__file__).resolve().parents[3] / "models" / "text_to_image"
CAPTIONED = {"shapes": ["红色的圆形", "蓝色的圆形", "蓝色的三角形", "蓝色的三角形"], "emoji": ["巴西的旗帜", "鬼"]}


@pytest.fixture(scope="module")
def tokenizer() -> M6Tokenizer:
    """Pieces of at most two characters."""
    return load_text_tokenizer(MODEL)


@pytest.fixture(scope="module")
def seen(tokenizer: M6Tokenizer) -> SeenCaptions:
    return describe_captions(tokenizer, CAPTIONED)


def test_the_record(seen: SeenCaptions):
    assert seen.rows == 6
    assert seen.examples == ["蓝色的三角形", "巴西的旗帜"]
    assert seen.following[""] == ["蓝", "巴", "红", "鬼"], "first characters, the commonest first"
    assert seen.following["形"] == [""]
    assert seen.following["的"] == ["三", "圆", "旗"]


@pytest.mark.parametrize("caption", [*CAPTIONED["shapes"], "红色的三角形", "鬼", " 鬼 "])
def test_what_is_made_of_known_words_is_not_warned_of(tokenizer: M6Tokenizer, seen: SeenCaptions, caption: str):
    """Also a combination that training left out."""
    assert seen.warning(tokenizer, caption) is None


@pytest.mark.parametrize(
    ("caption", "found"),
    [
        ("狗", ["狗"]),
        ("狗的圆形", ["狗"]),
        ("巴西旗帜", ["旗 after 西 (seen: 的)"]),
        ("圆形", ["圆 as the first character (seen: 蓝, 巴, 红)"]),
        ("龘的圆形", ["龘 as the first character (seen: 蓝, 巴, 红)", "的 after 龘"]),
        ("红色", ["the end after 色 (seen: 的)"]),
        ("a red", ["a", "a space", "r", "e", "d"]),
    ],
)
def test_what_is_new_is_named(tokenizer: M6Tokenizer, seen: SeenCaptions, caption: str, found: list[str]):
    assert seen.unseen(tokenizer, caption) == found
    warning = seen.warning(tokenizer, caption)
    assert warning is not None
    assert f'"{caption}"' in warning
    assert found[0] in warning
    assert "such as 蓝色的三角形, 巴西的旗帜" in warning
    assert ("and 1 more" in warning) == (len(found) == 5)


def test_what_was_cut_off_was_not_read(tokenizer: M6Tokenizer):
    whole, cut = (describe_captions(tokenizer, {"a": ["红色的圆形"]}, number) for number in (None, 2))
    assert whole.unseen(tokenizer, "红色的圆形") == []
    assert cut.unseen(tokenizer, "红色的圆形") == ["圆形"]


def test_a_model_that_learned_twice_knows_both(tokenizer: M6Tokenizer, seen: SeenCaptions):
    both = describe_captions(tokenizer, {"mine": ["狗的脸"]}).with_those_of(seen)
    for caption in ("狗的脸", "红色的圆形", "狗的圆形"):
        assert both.warning(tokenizer, caption) is None, caption
    assert both.unseen(tokenizer, "猫") == ["猫"]
    assert (both.rows, both.examples[0]) == (7, "狗的脸")


def test_a_run_keeps_those_of_its_initial_weights(tokenizer: M6Tokenizer, seen: SeenCaptions, tmp_path: Path):
    own = describe_captions(tokenizer, {"mine": ["狗的脸"]})
    data: Any = SimpleNamespace(seen_captions=lambda max_rows: own if max_rows >= own.rows else None)
    first, init, second = (tmp_path / name for name in ("first", "init", "second"))
    for folder in (first, init, second):
        folder.mkdir()
    write_captions(init, seen)
    keep_captions(first, data, None)
    assert kept_captions(first) == own
    keep_captions(second, data, init)
    assert kept_captions(second) == own.with_those_of(seen)
    keep_captions(first, data, init)
    assert kept_captions(first) == own, "an attempt that resumes leaves it as it is"
    keep_captions(tmp_path, SimpleNamespace(seen_captions=lambda _: None), None)  # type: ignore[arg-type]
    assert kept_captions(tmp_path) is None, "of a run that does not draw, or with too many captions"


def test_the_file(seen: SeenCaptions, tmp_path: Path):
    assert kept_captions(tmp_path) is None
    write_captions(tmp_path, seen)
    assert kept_captions(tmp_path) == seen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": "6"}, "rows: "),
        ({"pieces": {"红": 1}}, "pieces: "),
        ({"following": {"红": "色"}}, "following"),
        ({"format": 2}, "format: "),
        ({"run": "rm"}, "run: unknown key"),
    ],
)
def test_a_damaged_file_is_refused(seen: SeenCaptions, tmp_path: Path, change: dict, message: str):
    (tmp_path / CAPTIONS).write_text(json.dumps(seen.model_dump() | change), encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        kept_captions(tmp_path)
    assert str(tmp_path / CAPTIONS) in str(error.value)
    (tmp_path / CAPTIONS).write_bytes(b"\xff{")
    with pytest.raises(UserError, match="remove it to draw without warnings"):
        kept_captions(tmp_path)
