"""What a report says of data that a run, or one before it, learned from."""

import json

import pytest

from m6.checkpoints.provenance import keep_initial
from m6.config.run import load_config
from m6.evaluation.held_out import describe_overlap, open_held_out
from m6.runs.data import keep_sources, open_data
from tests.fixtures.fabricated_run import run_document, write_run
from tests.fixtures.tiny_data import ROWS, build_tiny_data, build_tiny_tokenizer


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Of ``data`` learned ``first``, of ``more`` ``second``, and of ``data`` after that ``third``."""
    tokenizer = build_tiny_tokenizer(tmp_path / "tokenizer")
    build_tiny_data(tmp_path / "data")
    monkeypatch.setitem(ROWS, "train", ROWS["train"] + 1)
    build_tiny_data(tmp_path / "more")
    for name, data in (("first", "data"), ("second", "more"), ("third", "data")):
        write_run(tmp_path / name, run_document(tmp_path / data, tokenizer))
        keep_sources(tmp_path / name, open_data(load_config(tmp_path / name / "config.json"), "train"))
    keep_initial(tmp_path / "third", tmp_path / "second")
    return tmp_path


@pytest.mark.parametrize(
    ("run", "data", "strangers"),
    [
        ("first", "data", []),
        ("first", "more", ["The run learned"]),
        ("third", "data", ["The run second, from which it began, learned"]),
        ("third", "more", ["The run learned"]),
    ],
)
def test_other_data_of_a_run_and_of_the_one_before_it(runs, run, data, strangers):
    opened = open_held_out(runs / run, load_config(runs / run / "config.json"), runs / data, "validation")
    said = describe_overlap(runs / run, opened)
    assert [stranger for stranger in strangers if f"{stranger} from other data" in said] == strangers
    assert said.count("from other data") == len(strangers)


def test_what_an_exported_model_without_a_record_has_seen_is_not_known(runs):
    document = json.loads((runs / "first" / "config.json").read_text())
    document["m6"]["init"] = str(runs / "exported")
    (runs / "first" / "config.json").write_text(json.dumps(document))
    opened = open_held_out(runs / "first", load_config(runs / "first" / "config.json"), runs / "data", "validation")
    said = describe_overlap(runs / "first", opened)
    assert said.endswith("It is not known what exported, from which it began, has seen.")
    assert "from other data" not in said
