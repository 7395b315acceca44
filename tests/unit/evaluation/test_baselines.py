"""Baselines on the tiny data folder: which targets they see, and when they are computed again."""

import errno
import json
import os

import numpy as np
import pytest
import torch

from m6.architecture.configuration import M6Config
from m6.config.run import parse_config
from m6.data.manifest import Manifest
from m6.data.objectives import OBJECTIVES
from m6.data.reader import open_split
from m6.errors import UserError
from m6.evaluation import baselines
from m6.evaluation.ngram import NGramCounts, NGramModel
from m6.runs.data import open_data
from tests.fixtures.fabricated_run import run_document
from tests.fixtures.tiny_data import ROWS, TINY_VOCAB_SIZE, build_tiny_data, build_tiny_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("baselines")
    return build_tiny_data(root / "data"), build_tiny_tokenizer(root / "tokenizer")


@pytest.fixture
def make_config(folders):
    def make(sequence_length=96, **weights):
        document = run_document(*folders)
        document["m6"]["data"]["sequence_length"] = sequence_length
        document["m6"]["objectives"] = {name: {"weight": weights.get(name, 0.0)} for name in OBJECTIVES}
        return parse_config(document)

    return make


def test_batch_targets_are_the_labels_of_each_sample(make_config):
    config = make_config(language_modelling=1.0, image_captioning=1.0)
    data = open_data(config)
    for objective in data.active_objectives:
        batches = list(data.validation_micro_batches(objective, 12))
        targets = baselines.batch_targets(batches, data.tokenizer.bos_token_id)
        # Packing puts several samples into a row, in any order.
        assert len(targets) == sum(batch.num_samples for batch in batches) == 12
        assert any(batch.input_ids.shape[0] < batch.num_samples for batch in batches)
        for target in targets:
            assert (target[0], target[-1]) == (data.tokenizer.bos_token_id, data.tokenizer.eos_token_id)
            assert (target[1:-1] < TINY_VOCAB_SIZE).all()
        labels = torch.cat([batch.labels[batch.labels != -100] for batch in batches]).numpy()
        assert np.array_equal(np.concatenate([target[1:] for target in targets]), labels)


def test_training_targets_are_all_training_rows(make_config):
    config = make_config(sequence_length=40, language_modelling=1.0, image_captioning=1.0)
    data, tokenizer = open_data(config), open_data(config).tokenizer
    for objective, source, longest in (
        ("language_modelling", "tiny_text", 38),
        ("image_captioning", "tiny_shapes", 34),
    ):
        targets = baselines.training_targets(config, data, objective)
        texts = open_split(Manifest.load(config.m6.data.path), source, "train").column("text")
        assert len(targets) == ROWS["train"]
        for target, text in zip(targets, texts, strict=True):
            ids = tokenizer.encode_ids(text)[:longest]
            assert target.tolist() == [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]


def test_losses(make_config):
    config = make_config(text_denoising=1.0, image_captioning=0.5)
    data = open_data(config)
    losses = baselines.compute_baselines(config, data, 12)
    assert list(losses) == ["text_denoising", "image_captioning"]
    uniform = np.log(config.model.vocab_size)
    for objective, by_model in losses.items():
        assert list(by_model) == ["unigram", "bigram", "5-gram"]
        # The texts are made from few templates, so that a context tells much.
        assert max(by_model["5-gram"], by_model["bigram"]) < by_model["unigram"] - 0.5 < uniform
        held_out = baselines.batch_targets(data.validation_micro_batches(objective, 12), data.tokenizer.bos_token_id)
        counts = NGramCounts(baselines.training_targets(config, data, objective), 2, config.model.vocab_size)
        model = NGramModel(counts, 2)
        assert by_model["bigram"] == model.mean_loss(held_out)


def test_the_unigram_model_knows_the_codebook_of_a_code():
    config = M6Config(text_vocab_size=10, image_vocab_size=6, codes_per_place=2)
    first, bos, eos = config.first_code_id, config.bos_token_id, config.eos_token_id
    sequences = [[bos, 3, first, first + 4, first + 1, first + 4, eos], [bos, 3, first, first + 5, eos]]
    unigram = NGramModel(NGramCounts(sequences, 1, config.vocab_size), 1)
    masses = baselines._log_book_masses(unigram, config)
    each = [np.exp(unigram.log_probabilities([[bos, token]]))[0] for token in range(config.vocab_size)]
    books = [sum(each[first : first + 3]), sum(each[first + 3 :])]
    assert masses == pytest.approx([0.0] * first + [np.log(books[0])] * 3 + [np.log(books[1])] * 3)


def test_a_model_without_codes_has_no_codebooks():
    """And no warning of a logarithm of 0, which this turns into an error."""
    config = M6Config(text_vocab_size=10, image_vocab_size=0)
    unigram = NGramModel(NGramCounts([[config.bos_token_id, 3, 4, config.eos_token_id]], 1, config.vocab_size), 1)
    with np.errstate(all="raise"):
        assert not baselines._log_book_masses(unigram, config).any()


def test_only_the_unigram_model_is_told_the_codebook(make_config, monkeypatch):
    config = make_config(image_captioning=1.0)
    plain = baselines.compute_baselines(config, open_data(config), 12)["image_captioning"]
    monkeypatch.setattr(baselines, "_log_book_masses", lambda *_: np.full(config.model.vocab_size, -0.25))
    told = baselines.compute_baselines(config, open_data(config), 12)["image_captioning"]
    assert told == pytest.approx({**plain, "unigram": plain["unigram"] - 0.25})


def test_targets_in_place_have_no_context():
    assert list(baselines.orders("image_code_denoising")) == ["unigram"]
    assert list(baselines.orders("text_to_image")) == ["unigram", "bigram", "5-gram"]


def test_are_kept_until_something_changes(make_config, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        baselines,
        "compute_baselines",
        lambda *arguments: calls.append(1) or {"language_modelling": {"bigram": 1.0}},
    )
    config = make_config(language_modelling=1.0)
    assert baselines.read_baselines(tmp_path) == {}
    first = baselines.run_baselines(tmp_path, config, 12)
    assert baselines.run_baselines(tmp_path, config, 12) == first == baselines.read_baselines(tmp_path)
    assert len(calls) == 1
    baselines.run_baselines(tmp_path, config, 8)
    assert len(calls) == 2
    baselines.run_baselines(tmp_path, make_config(language_modelling=1.0, sequence_length=90), 8)
    assert len(calls) == 3


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_run_that_is_read_only_has_baselines(make_config, tmp_path, monkeypatch, capsys, code):
    def refuse(path, value):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(baselines, "write_json", refuse)
    config = make_config(language_modelling=1.0)
    if code == errno.ENOSPC:  # a defect that should be mended
        with pytest.raises(OSError, match="No space"):
            baselines.run_baselines(tmp_path, config, 4)
        return
    assert "5-gram" in baselines.run_baselines(tmp_path, config, 4)["language_modelling"]
    expected = (
        f"warning: {tmp_path / 'baselines.json'} cannot be written, so the baselines are computed again next time"
    )
    assert capsys.readouterr().err.splitlines() == [expected]


def test_a_corrupt_file_is_named(tmp_path):
    file = baselines.baselines_file(tmp_path)
    file.write_text("{")
    with pytest.raises(UserError, match=r"baselines\.json: corrupt"):
        baselines.read_baselines(tmp_path)
    file.write_text(json.dumps([1]))
    with pytest.raises(UserError, match="corrupt: no JSON object; remove it"):
        baselines.read_baselines(tmp_path)
    file.write_text("{}")
    with pytest.raises(UserError, match="holds no baselines"):
        baselines.read_baselines(tmp_path)
