"""Messages about JSON: short and soon, however much of it is wrong."""

from pathlib import Path
from typing import Any

import pytest

from m6.config.run import parse_config
from m6.errors import UserError, closest, first_line
from m6.validation import check_keys, parse_json, read_document

KEYS = {f"key_{number}": 1 for number in range(20_000)}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("where", ["", "m6", "m6.model", "m6.data", "optimizer.params"])
def test_of_many_unknown_keys_a_few_are_named(where: str):
    document: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "m6": {
            "model": {},
            "data": {"path": "data", "tokenizer": "tokenizer"},
            "objectives": {},
            "training": {"total_steps": 4},
        },
    }
    section = document
    for name in filter(None, where.split(".")):
        section = section[name]
    section.update(KEYS)
    with pytest.raises(UserError) as caught:
        parse_config(document)
    message = str(caught.value)
    assert message.startswith(f"{where}.key_0: unknown key; ".lstrip("."))
    assert message.endswith(
        "; also unknown: key_1, key_2, key_3, key_4, key_5, key_6, key_7, key_8, key_9 and 19,990 more"
    )


def test_one_unknown_key_and_a_long_one():
    with pytest.raises(UserError, match=r'^a\.layer: unknown key; did you mean "layers"\?$'):
        check_keys({"layer": 1}, {"layers", "heads"}, "a")
    with pytest.raises(UserError) as caught:
        check_keys({"x" * 10_000: 1}, {"layers"}, "a")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["M6", "m_6", "m6_", "m 6", "mm6"])
def test_the_section_under_another_name(name: str):
    """Alone, and where ``--set`` made it next to the right one."""
    keys = {"train_batch_size": 8, name: {"training": {"total_steps": 4}}}
    for document in (keys, {**keys, "m6": {}}):
        with pytest.raises(UserError) as caught:
            parse_config(document)
        assert str(caught.value) == f'{name}: unknown key; did you mean "m6"?'
    with pytest.raises(UserError, match='the section "m6" is missing'):
        parse_config({"train_batch_size": 8, "model": {}})


@pytest.mark.parametrize("text", [r"a\u0000b", r"\ud800x", r"x\udfff"])
def test_a_text_that_no_file_name_can_hold(text: str):
    with pytest.raises(UserError, match=r"^m6\.data\.path: '.*' holds a character that no file name and no UTF-8 can"):
        parse_json(f'{{"m6": {{"data": {{"path": "{text}"}}}}}}')
    with pytest.raises(UserError, match=r"^m6\.1: '.*' holds a character"):
        parse_json(f'{{"m6": ["x", "{text}"]}}')
    with pytest.raises(UserError, match=r"^m6: '.*' holds a character"):
        parse_json(f'{{"m6": {{"{text}": 1}}}}')
    with pytest.raises(UserError, match=r"^'\\x00¡' holds a character"):  # only what cannot be shown is escaped
        parse_json(r'{"\u0000¡": 1}')
    assert parse_json(r'["\ud83d\udc3c\\u0000"]') == ["🐼\\u0000"]


def test_a_misspelling_in_other_letters():
    assert closest("ADAMW", ("AdamW", "Adafactor")) == "AdamW"
    assert closest("Num_Layer", ("num_layers", "num_heads")) == "num_layers"
    assert closest("optimizer", ("M6", "m6")) is None


def test_the_first_line_of_a_message():
    assert first_line(ValueError("\n\n  a reason\nand more")) == "a reason"
    assert first_line(ValueError(" \n")) == "ValueError"


@pytest.mark.timeout(30)
def test_many_keys_are_searched_for_a_duplicate():
    pairs = [f'"key_{number}": 1' for number in range(100_000)]
    assert len(parse_json("{" + ", ".join(pairs) + "}")) == 100_000
    with pytest.raises(UserError, match='the key "key_7" is given twice'):
        parse_json("{" + ", ".join([*pairs, '"key_7": 2']) + "}")


def test_a_file_may_hold_comments(tmp_path: Path):
    file = tmp_path / "run.json"
    file.write_text("""// first
{
  "url": "http://a//b", /* of several
  lines */ "escaped": "\\"// no comment",  // to the end
  "number": 2 // last
}""")
    assert read_document(file) == {"url": "http://a//b", "escaped": '"// no comment', "number": 2}
    file.write_text('{\n  /* two\n lines */ "a": 1, // "b": 2\n  "c": x\n}')
    with pytest.raises(UserError, match="line 4 column 8"):
        read_document(file)
    file.write_text('{"a": 1} /* without an end')
    with pytest.raises(UserError, match="not readable as JSON"):
        read_document(file)


def test_a_message_is_one_line_that_a_terminal_can_show():
    with pytest.raises(UserError) as caught:
        check_keys({"two\nlines\x1b[31m猫": 1}, {"layers"}, "a")
    assert str(caught.value).startswith(r"a.two\nlines\x1b[31m猫: unknown key")


@pytest.mark.parametrize(
    ("where", "key", "written"),
    [
        ("", "optimizer", "optimnizer"),
        ("optimizer", "type", "tpye"),
        ("optimizer.params", "lr", "lrr"),
        ("m6", "training", "trainig"),
        ("m6.data", "tokenizer", "tokeniser"),
        ("m6.training", "total_steps", "totalsteps"),
    ],
)
def test_a_misspelt_required_key_is_no_missing_one(where: str, key: str, written: str):
    document: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "m6": {"data": {"path": "data", "tokenizer": "tokenizer"}, "objectives": {}, "training": {"total_steps": 4}},
    }
    section = document
    for name in filter(None, where.split(".")):
        section = section[name]
    section[written] = section.pop(key)
    with pytest.raises(UserError) as caught:
        parse_config(document)
    assert str(caught.value) == f'{where}.{written}: unknown key; did you mean "{key}"?'.lstrip(".")
    del section[written]
    with pytest.raises(UserError, match=r": missing"):
        parse_config(document)
