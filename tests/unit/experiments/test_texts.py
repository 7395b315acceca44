"""The texts of labelled rows, for pretraining."""

import json

from scripts.experiments.downstream import texts
from tests.fixtures.tiny_data import build_labelled_data


def test_texts_of_the_training_split_alone(tmp_path):
    texts.main(build_labelled_data(tmp_path / "data"), "reviews", tmp_path / "texts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [{"text": "很好"}, {"text": "很差"}] * 6
