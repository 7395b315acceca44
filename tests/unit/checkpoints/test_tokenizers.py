"""A run is used without the tokenizers that it was trained with: it keeps copies."""

import shutil
from pathlib import Path

import pytest
import torch

from m6.checkpoints.loading import load_run_model
from m6.checkpoints.tokenizers import IMAGE_TOKENIZER, TOKENIZER, copy_kept_tokenizers, find_tokenizer, keep_tokenizers
from m6.errors import UserError
from m6.tokenizers.image import load_image_tokenizer
from m6.tokenizers.image.modeling import ImageTokenizerConfig, M6ImageTokenizer
from m6.tokenizers.text import load_text_tokenizer
from tests.fixtures.command import contents
from tests.fixtures.fabricated_run import run_document, write_run
from tests.fixtures.tiny_data import build_tiny_data, build_tiny_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return build_tiny_tokenizer(tmp_path / "of text")


@pytest.fixture
def image_tokenizer(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = ImageTokenizerConfig(image_size=16, patch_size=8, channels=[8], codebook_size=8, codebook_dim=4)
    M6ImageTokenizer(config).save_pretrained(tmp_path / "of pictures")
    return tmp_path / "of pictures"


def test_copies_are_equal_and_made_once(tmp_path: Path, tokenizer: Path, image_tokenizer: Path):
    run = tmp_path / "run"
    keep_tokenizers(run, load_text_tokenizer(tokenizer), image_tokenizer)
    assert load_text_tokenizer(run / TOKENIZER).fingerprint == load_text_tokenizer(tokenizer).fingerprint
    assert load_image_tokenizer(run / IMAGE_TOKENIZER).checksum == load_image_tokenizer(image_tokenizer).checksum
    times = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    keep_tokenizers(run, load_text_tokenizer(tokenizer), image_tokenizer)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == times
    copy_kept_tokenizers(run, tmp_path / "delinked")
    assert contents(tmp_path / "delinked" / TOKENIZER) == contents(run / TOKENIZER)


def test_a_run_is_used_when_its_tokenizer_is_gone(tmp_path: Path, tokenizer: Path):
    build_tiny_data(tmp_path / "data")
    write_run(tmp_path / "run", run_document(tmp_path / "data", tokenizer))
    keep_tokenizers(tmp_path / "run", load_text_tokenizer(tokenizer), None)
    shutil.rmtree(tokenizer)
    shutil.rmtree(tmp_path / "data")
    _, processor = load_run_model(tmp_path / "run", torch.device("cpu"))
    assert processor(text="红色")["input_ids"].shape[0] == 1
    shutil.rmtree(tmp_path / "run" / TOKENIZER)
    with pytest.raises(
        UserError, match=r"run keeps no tokenizer, and .*of text, which its config.json names, is missing"
    ):
        load_run_model(tmp_path / "run", torch.device("cpu"))


def test_an_older_run_reads_what_its_json_names(tmp_path: Path, tokenizer: Path):
    assert find_tokenizer(tmp_path / "run", TOKENIZER, tokenizer) == tokenizer


def test_a_disk_that_is_full(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    loaded = load_text_tokenizer(tokenizer)
    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*tokenizer"):
        keep_tokenizers(tmp_path / "run", loaded, None)
    assert list((tmp_path / "run").iterdir()) == []
