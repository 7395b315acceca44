"""Recipes: what is accepted, and what a mistake is called."""

import json
from pathlib import Path

import pytest

from m6.corpus.recipe import load_recipe
from m6.shipped import CONFIGS
from tests.fixtures.command import user_error
from tests.fixtures.corpus import own, text_of, write_lines


@pytest.mark.parametrize("file", sorted((CONFIGS / "corpus").glob("*.json")), ids=lambda file: file.stem)
def test_shipped_recipes_are_valid(file: Path):
    assert load_recipe(file).inputs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": []}, 'input: unknown key; did you mean "inputs"?'),
        ({"inputs": []}, "inputs: list should have at least 1 item"),
        ({"inputs": [{"source": "web"}]}, "inputs.0: name is missing"),
        ({"inputs": [{"source": "inews"}, {"source": "x", "name": "inews"}]}, 'two inputs are called "inews"'),
        (
            {"decontamination": {"sets": [{"name": "a", "path": "b"}, {"name": "a", "path": "c"}]}},
            'two of decontamination.sets are called "a"',
        ),
        ({"inputs": [{"source": "missing", "name": "web"}]}, 'no file or folder "missing" (source "web"); valid: '),
        (
            {"inputs": [{"source": "easy_vqa_questions"}]},
            '"easy_vqa_questions" has rows of kind vqa; a corpus is made of',
        ),
        ({"inputs": own("web", Path("texts"), licence=None)}, '"web" has no licence'),
        *(
            ({"inputs": [{"source": source, "name": "a"}]}, "inputs.0: source has a user's name, a password or a query")
            for source in (
                "https://TOKEN@a.org/b.tar",
                "zip://b.jsonl::https://me:PASSWORD@a.org/b.zip",
                "https://a.org/b.jsonl?X-Amz-Signature=SECRET",
                "HTTPS://a.org/data/?sig=SECRET",
            )
        ),
        ({"inputs": [{"source": "ftp://user:word@a.org/b", "name": "a"}]}, "which the manifest would publish"),
        (
            {"inputs": own("web", Path("empty"))},
            "empty: expected pictures, or files .jsonl, .jsonl.gz, .parquet, .warc, .warc.gz, .wet, .wet.gz, .txt, .md",
        ),
        ({"filters": {"min_charz": 3}}, 'filters.min_charz: unknown key; did you mean "min_chars"?'),
        ({"filters": {"min_chinese_share": 2}}, "filters.min_chinese_share: input should be less than or equal to 1"),
        ({"picture_filters": {"min_match": 0.5}}, "min_match is 0.5, but there is no matching_model"),
        ({"matching_model": "run"}, "matching_model would compare nothing: picture_filters.min_match is 0"),
        (
            {"matching_model": "run", "picture_filters": {"min_match": 0.5}},
            "run: neither a run nor an exported model",
        ),
        ({"validation_share": 0.5, "test_share": 0.5}, "leave nothing to train on"),
        ({"decontamination": {"sets": [{"name": "q", "path": "empty"}]}}, "decontamination.sets: empty: expected"),
    ],
)
def test_a_mistake_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "texts" / "a.jsonl", [text_of(0)])
    (tmp_path / "empty").mkdir()
    recipe = {"out": "data", "inputs": own("web", Path("texts"))} | changes
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert message in user_error("data", "corpus", "recipe.json")
    assert not (tmp_path / "data").exists()


def test_an_input_without_a_usable_document_is_named(tmp_path: Path):
    write_lines(tmp_path / "a.jsonl", ["太短了", "也太短"])
    recipe = {"out": str(tmp_path / "data"), "inputs": own("web", tmp_path / "a.jsonl")}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    message = user_error("data", "corpus", tmp_path / "recipe.json")
    assert message == 'stage "select", unit 0: input "web" has no usable document (too short: 2)'
