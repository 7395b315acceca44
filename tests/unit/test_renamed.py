"""Keys with a new name: the old one works, and the user is told."""

from pathlib import Path

import pytest

from m6.architecture.settings import ModelSettings
from m6.config.run import load_config, parse_config
from m6.errors import UserError
from m6.files import write_json
from m6.renamed import RENAMED, with_new_keys
from m6.runs.directory import RunDirectory
from tests.fixtures.tiny_run import tiny_document

OLD = {"m6__moe": {"num_experts": 4, "payload": "float8"}, "m6__training__micro_batches_at_once": 1}
NEW = {"m6__moe": {"num_experts": 4, "dispatch_dtype": "float8"}, "m6__training__overlap_micro_batches": 1}


def test_an_old_key_is_the_new_one_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old, new = (tiny_document(tmp_path, **changes) for changes in (OLD, NEW))
    write_json(tmp_path / "run.json", old)
    config = load_config(tmp_path / "run.json")
    assert config.document == parse_config(new).document
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {tmp_path / 'run.json'}: {before} is now {after}; the old name works until version 0.2"
        for before, after in RENAMED.items()
    ]
    assert with_new_keys(new) == (new, [])


def test_a_run_with_old_keys_goes_on_with_new_ones(tmp_path: Path):
    old, new = (tiny_document(tmp_path, **changes) for changes in (OLD, NEW))
    directory = RunDirectory(tmp_path / "run")
    directory.open(parse_config(with_new_keys(old)[0]), 1)
    write_json(directory.root / "config.json", old)  # as an older version wrote it
    directory.check(parse_config(new))


def test_a_list_of_keys_may_hold_an_old_name(tmp_path: Path):
    document = tiny_document(
        tmp_path, m6__elastic={"max_nodes": 2, "may_change": ["micro_batches_at_once", "pipeline"]}
    )
    found, warnings = with_new_keys(document)
    assert found["m6"]["elastic"]["may_change"] == ["overlap_micro_batches", "pipeline"]
    [warning] = warnings
    assert warning.startswith('m6.elastic.may_change: "micro_batches_at_once" is now "overlap_micro_batches"; ')


def test_both_names_are_a_mistake(tmp_path: Path):
    document = tiny_document(tmp_path, m6__moe={"num_experts": 4, "payload": "same", "dispatch_dtype": "same"})
    write_json(tmp_path / "run.json", document)
    with pytest.raises(
        UserError, match=r"run\.json: m6\.moe\.payload and m6\.moe\.dispatch_dtype are two names of one key"
    ):
        load_config(tmp_path / "run.json")


def test_an_export_with_an_old_key_loads():
    settings = ModelSettings(moe={"num_experts": 4, "payload": "float8"})
    assert settings.moe_config().dispatch_dtype == "float8"
