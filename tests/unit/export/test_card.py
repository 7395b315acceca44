"""The model card says what the run recorded, and what it did not."""

import json
import re
import shutil
from typing import Any

import pytest
from huggingface_hub import ModelCard

from m6.checkpoints.loading import open_newest_checkpoint
from m6.checkpoints.provenance import keep_initial
from m6.config.run import load_config
from m6.errors import UserError
from m6.export import export_hf
from m6.export.card import model_card
from m6.model import num_parameters
from m6.runs.data import keep_sources, open_data
from m6.runs.directory import INITIAL, SOURCES
from tests.fixtures.fabricated_run import training_entry, write_metrics, write_run_and_data


def split_of(rows: int, **others: Any) -> dict[str, Any]:
    """The entry of a split with one shard."""
    shard = {"file": "train/000.parquet", "rows": rows, "bytes": 10 * rows, "sha256": 64 * "0"}
    return {"rows": rows, "bytes": 10 * rows, "shards": [shard], **others}


@pytest.fixture
def run(tmp_path):
    write_run_and_data(tmp_path)
    return tmp_path / "run"


def card_of(run) -> ModelCard:
    return model_card(run, load_config(run / "config.json"), open_newest_checkpoint(run), "float32")


def test_a_run_with_all_records(run):
    config = load_config(run / "config.json")
    data = open_data(config)
    keep_sources(run, data)
    validation = {
        "validation": {"image_captioning": 1.25, "text_denoising": None, "text_to_image": 800.0},
        "validation_by_source": {"image_captioning": {"tiny_shapes": 1.25}},
    }
    write_metrics(run, [{"step": 50, "validation": {"image_captioning": 7.0}}, {"step": 100, **validation}])
    attempt = run / "provenance" / "attempt_000"
    attempt.mkdir(parents=True)
    packages = {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
    record = {"time": "2026-11-22", "world_size": 2, "host": "secret", "hardware": "a CPU", "git_commit": "abc"}
    (attempt / "attempt.json").write_text(json.dumps({**record, "packages": packages}))

    card = card_of(run)
    counts = num_parameters(config.model)
    for fact in (
        f"{counts['total']:,} parameters",
        f"{counts['active_per_token']:,}",
        "| image_captioning | 1.250 | 3.490 |",
        "| text_denoising | not finite |",
        "| text_to_image | 800.000 | inf |",
        "At step 100",
        "400 and 12,000",
        "2 x a CPU",
        "commit abc",
        "torch 2.13.0",
        "4 (2 x 1)",
        "| image_captioning | tiny_shapes | 1.250 |",
        "ZeRO stage 0, micro-batches of 4",
        "AdamW, peak learning rate 0.001, steps of warm-up: 1",
    ):
        assert fact in card.text, fact
    assert "share with training was not counted" in card.text
    for name, entry in data.manifest.sources.items():
        assert re.search(rf"\| {name} \| {entry.kind} .*\| {re.escape(entry.licence)} \|", card.text)
    assert "7.0" not in card.text, "only the last validation"
    assert "secret" not in card.content, "no names of hosts"
    assert str(run.parent) not in card.content, "no folders of this machine"
    stated = card.data.to_dict()
    assert stated["library_name"] == "transformers"
    assert stated["pipeline_tag"] == "image-text-to-text"
    assert stated["license"] == "unknown"
    assert "mixture-of-experts" in stated["tags"]
    assert "language" not in stated, "the sources are a user's own"


@pytest.mark.parametrize("objective", ["text_to_image", "image_code_denoising"])
def test_a_model_that_draws_says_how(run, objective):
    assert "Drawing" not in card_of(run).text
    file = run / "config.json"
    document = json.loads(file.read_text())
    document["m6"]["objectives"][objective] = {"weight": 1.0}
    document["m6"]["data"]["image_tokenizer"] = "pictures"
    file.write_text(json.dumps(document))
    text = card_of(run).text
    assert "writes text and image codes" in text
    assert "Drawing pictures needs m6-recipes: `M6TextToImagePipeline.from_pretrained(FOLDER)`" in text


def test_products_in_16_bits_are_stated(run):
    file = run / "config.json"
    document = json.loads(file.read_text())
    assert "| precision | fp32 |" in card_of(run).text
    file.write_text(json.dumps({**document, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}))
    assert "| precision | fp32, with products in bfloat16 (autocast) |" in card_of(run).text


def test_a_run_without_records(run):
    card = card_of(run)
    assert "Unknown: the run did not record its sources." in card.text
    assert "Unknown: the run recorded no validation." in card.text
    assert "hardware" not in card.text
    assert "Of the data: unknown" in card.text
    assert card.data.language is None


def test_validation_after_the_checkpoint_is_not_of_this_model(run):
    write_metrics(run, [training_entry(110, {"text_denoising": 2.0}), {"step": 120, "validation": {"vqa": 1.0}}])
    assert "Unknown: the run recorded no validation." in card_of(run).text


def test_built_in_sources_are_chinese_and_data_sets_of_the_hub_are_linked(run):
    entry = {"kind": "text", "licence": "MIT", "splits": {"train": split_of(3)}}
    origin = {"package": "hf:someone/texts:train", "version": "0a", "licence": "MIT"}
    (run / SOURCES).write_text(json.dumps({"sources": {"inews": {**entry, "origin": [origin]}}}))
    card = card_of(run)
    assert card.data.language == "zh"
    assert card.data.datasets == ["someone/texts"]
    assert "| inews | text | 3 | 0 | 0 | 0.0 | MIT | hf:someone/texts:train 0a |" in card.text


def test_the_runs_before_are_in_the_card_when_they_are_gone(run):
    entry = {"kind": "text", "licence": "MIT", "splits": {"train": split_of(3)}}
    origin = {"package": "hf:someone/texts:train", "version": "0a", "licence": "MIT"}
    first, second = run.with_name("first"), run.with_name("second")
    for folder, sources in (
        (first, {"inews": {**entry, "origin": [origin]}}),
        (second, {"poetry": {**entry, "origin": []}}),
    ):
        shutil.copytree(run, folder)
        (folder / SOURCES).write_text(json.dumps({"sources": sources}))
    (run / SOURCES).write_text(json.dumps({"sources": {"mine": {**entry, "licence": "CC0-1.0", "origin": []}}}))
    document = json.loads((run / "config.json").read_text())
    document["m6"]["init"] = str(second)
    (run / "config.json").write_text(json.dumps(document))
    assert "## Before: second\nUnknown: no record" in card_of(run).text
    keep_initial(second, first)
    keep_initial(run, second)
    shutil.rmtree(first)
    shutil.rmtree(second)
    keep_initial(run, second)  # as an attempt after the first does

    card = card_of(run)
    assert "| initial weights | of second, see below |" in card.text
    after_second = card.text.partition("## Before: second\n")[2]
    assert "| poetry | text | 3 |" in after_second.partition("## Before: first\n")[0]
    assert "| inews | text | 3 |" in after_second.partition("## Before: first\n")[2]
    assert "| steps | 100 |" in after_second
    assert "400 and 12,000" in after_second
    assert "text_denoising 1" in after_second
    assert "Of the data: CC0-1.0, MIT." in card.text
    assert card.data.datasets == ["someone/texts"]
    assert str(run.parent) not in card.content
    (run / INITIAL).write_text("{")
    with pytest.raises(UserError, match=r"initial\.json: corrupt"):
        card_of(run)


def test_a_licence_of_the_weights_is_stated(run, tmp_path):
    export_hf(run, tmp_path / "hf", licence="cc-by-sa-4.0")
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert card.data.license == "cc-by-sa-4.0"
    assert "Of the weights: cc-by-sa-4.0." in card.text


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_run_from_an_exported_model_names_its_data_or_calls_them_unknown(run, tmp_path, is_recorded):
    """So does a run that began from that one."""
    entry = {"kind": "text", "licence": "MIT", "splits": {"train": split_of(3)}, "origin": []}
    (run / SOURCES).write_text(json.dumps({"sources": {"poetry": entry}}))
    export_hf(run, tmp_path / "hf")
    if not is_recorded:  # by a version before this one
        (tmp_path / "hf" / INITIAL).unlink()
    document = json.loads((run / "config.json").read_text())
    for name, init in (("second", "hf"), ("third", "second")):
        shutil.copytree(run, tmp_path / name)
        document["m6"]["init"] = str(tmp_path / init)
        (tmp_path / name / "config.json").write_text(json.dumps(document))
        sources = {"inews": {**entry, "licence": "CC0-1.0"}}
        (tmp_path / name / SOURCES).write_text(json.dumps({"sources": sources}))
        if is_recorded or name == "third":
            keep_initial(tmp_path / name, tmp_path / init)
        card = card_of(tmp_path / name)
        origin = "run" if is_recorded else "hf"
        before = card.text.partition(f"## Before: {origin}\n")[2]
        if is_recorded:
            assert "| poetry | text | 3 |" in before
            assert "Of the data: CC0-1.0, MIT." in card.text
        else:
            assert before.startswith("Unknown: no record of its data, their licences and its training was kept.")
            assert "Of the data: CC0-1.0, unknown." in card.text
            assert card.data.language is None
    keep_initial(run, tmp_path / "hf")
    assert (run / INITIAL).exists()


def test_a_run_that_resumes_may_outlive_its_initial_run(run):
    keep_initial(run, run.with_name("gone"))
    assert not (run / INITIAL).exists()


def test_leaks_are_in_the_card(run):
    shared = {"rows": 2, "picture": 1, "text": 2, "group": 0}
    splits = {"train": split_of(3), "validation": split_of(4, shared=shared)}
    entry = {"kind": "image_text", "licence": "MIT", "origin": [], "splits": splits}
    (run / SOURCES).write_text(json.dumps({"sources": {"mine": entry}}))
    text = card_of(run).text
    assert "validation of mine 2 of 4 rows (1 a picture, 2 a caption or text)" in text
    assert "the losses measure memory in part" in text


def test_a_dense_model_is_called_dense(tmp_path, run):
    document = json.loads((run / "config.json").read_text())
    del document["m6"]["moe"]
    (run / "config.json").write_text(json.dumps(document))
    card = card_of(run)
    assert "a dense transformer" in card.text
    assert "mixture-of-experts" not in card.data.tags
    assert "experts" not in card.text


def test_damaged_sources_are_named(run):
    (run / SOURCES).write_text("{")
    with pytest.raises(UserError, match=r"sources\.json: corrupt"):
        card_of(run)


def test_the_card_is_in_the_export(run, tmp_path):
    export_hf(run, tmp_path / "hf")
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert card.content == card_of(run).content
    assert "trust_remote_code=True" in card.text
