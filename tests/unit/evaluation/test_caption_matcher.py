"""A run as a filter of captions: its scores, what a corpus keeps by them, and runs that cannot score."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from m6.checkpoints.loading import load_run_model
from m6.corpus.output import load_record
from m6.data.objectives import OBJECTIVES, max_text_tokens
from m6.evaluation.caption_matcher import CaptionMatcher
from m6.evaluation.metrics import match_by_model
from m6.tokenizers.pictures import decode_picture
from tests.fixtures.command import m6, user_error
from tests.fixtures.corpus import own
from tests.fixtures.fabricated_run import run_document, write_run
from tests.fixtures.photographs import file_of, photograph, write_pairs
from tests.fixtures.tiny_data import IMAGE_SIDE, build_tiny_data, build_tiny_tokenizer

CAPTIONS = [f"第{number}张图片：{'红蓝绿黄'[number % 4]}色的{'圆形方块'[number % 2 :][:2]}" for number in range(40)]
PICTURES = [file_of(photograph(number)) for number in range(40)]


def write_run_of(folder: Path, objective: str) -> Path:
    document = run_document(folder / "data", folder / "tokenizer", initializer_range=0.1)
    document["m6"]["objectives"] = {name: {"weight": float(name == objective)} for name in OBJECTIVES}
    write_run(folder / objective, document)
    return folder / objective


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matcher")
    build_tiny_data(folder / "data")
    build_tiny_tokenizer(folder / "tokenizer")
    write_run_of(folder, "image_text_matching")
    return folder


def test_the_score_is_the_share_of_a_match(folder: Path):
    run = folder / "image_text_matching"
    scores = CaptionMatcher(run)(PICTURES, CAPTIONS)
    model, processor = load_run_model(run, torch.device("cpu"))
    pictures = [decode_picture(picture, IMAGE_SIDE) for picture in PICTURES]
    document = json.loads((run / "config.json").read_text())
    max_tokens = max_text_tokens(
        "image_text_matching", document["m6"]["data"]["sequence_length"], model.config.num_patches
    )
    odds = match_by_model(model, processor, pictures, CAPTIONS, max_tokens).diagonal()
    # Losses are fp32, and other examples in a batch round otherwise.
    np.testing.assert_allclose(np.log(scores) - np.log1p(-scores), odds, rtol=1e-4)
    assert np.ptp(odds) > 0.1, "the test below would not divide the pictures"


def test_a_corpus_keeps_what_the_run_finds_fitting(folder: Path, tmp_path: Path):
    run = folder / "image_text_matching"
    write_pairs(tmp_path / "web.tar", [(str(n), CAPTIONS[n], PICTURES[n]) for n in range(len(CAPTIONS))])
    recipe = {
        "out": str(tmp_path / "data"),
        "inputs": own("web", tmp_path / "web.tar"),
        "matching_model": str(run),
        "picture_filters": {"min_match": 0.0001},
        "image_size": IMAGE_SIDE,
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert m6("data", "corpus", tmp_path / "recipe.json").code == 0
    assert load_record(tmp_path / "data").inputs["web"].kept == len(CAPTIONS)
    stored = [row["image"] for row in rows_in(tmp_path / "data")]
    scores = CaptionMatcher(run)(stored, [row["text"] for row in rows_in(tmp_path / "data")])
    threshold = float(np.sort(scores)[19:21].mean())
    where = (f"out={tmp_path / 'half'}", f"picture_filters.min_match={threshold}")
    outcome = m6("data", "corpus", tmp_path / "recipe.json", "--set", where[0], "--set", where[1])
    assert outcome.code == 0, outcome.stderr
    assert "removed: matching 20" in outcome.stdout
    wanted = {row["text"] for row, score in zip(rows_in(tmp_path / "data"), scores, strict=True) if score >= threshold}
    assert {row["text"] for row in rows_in(tmp_path / "half")} == wanted


def rows_in(corpus: Path) -> list[dict[str, object]]:
    from m6.data.manifest import Manifest
    from m6.data.reader import open_split

    manifest = Manifest.load(corpus)
    splits = [split for split, entry in manifest.sources["web"].splits.items() if entry.rows]
    return [row for split in splits for row in open_split(manifest, "web", split)]


def test_models_that_cannot_score_are_named(folder: Path, tmp_path: Path):
    write_pairs(tmp_path / "web.tar", [("a", CAPTIONS[0], PICTURES[0])])
    untrained = write_run_of(folder, "image_captioning")
    assert m6("export", folder / "image_text_matching", "--hf", tmp_path / "exported").code == 0
    for model, message in (
        (untrained, "was not trained on image_text_matching; fine-tune it"),
        (tmp_path / "exported", "is an exported model; name the run"),
        (tmp_path, "neither a run nor an exported model"),
    ):
        recipe = {
            "out": str(tmp_path / "data"),
            "inputs": own("web", tmp_path / "web.tar"),
            "matching_model": str(model),
            "picture_filters": {"min_match": 0.5},
        }
        (tmp_path / "recipe.json").write_text(json.dumps(recipe))
        assert message in user_error("data", "corpus", tmp_path / "recipe.json")
        assert not (tmp_path / "data").exists()
