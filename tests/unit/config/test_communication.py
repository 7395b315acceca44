"""The section m6.communication: its keys, and one message for each that is wrong."""

from pathlib import Path
from typing import Any

import pytest

from m6.config.run import parse_config
from m6.errors import UserError
from tests.fixtures.tiny_run import tiny_document

TOP_K = {"gradients": "top_k", "density": 0.01}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m6__communication": {"gradients": "top_k"}}, "m6.communication.density: missing"),
        ({"m6__communication": {"gradients": "chunks"}}, "m6.communication.density: missing"),
        ({"m6__communication": {"gradients": "powersgd"}}, "m6.communication.rank: missing"),
        ({"m6__communication": {**TOP_K, "rank": 2}}, 'm6.communication.rank: .* it belongs to "powersgd"'),
        ({"m6__communication": {**TOP_K, "chunk_elements": 64}}, 'it belongs to "chunks"'),
        ({"m6__communication": {"density": 0.1}}, 'it belongs to "top_k", "chunks"'),
        ({"m6__communication": {**TOP_K, "density": 0}}, "m6.communication.density"),
        ({"m6__communication": {"gradients": "sparse"}}, "m6.communication.gradients"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    document = tiny_document(tmp_path, **{"m6__communication": TOP_K, **changes})
    with pytest.raises(UserError, match=message):
        parse_config(document)


def test_what_can(tmp_path: Path):
    document = tiny_document(tmp_path, m6__communication=TOP_K, zero_optimization={"stage": 1}, bf16={"enabled": True})
    assert parse_config(document).m6.communication.compresses
    assert not parse_config(tiny_document(tmp_path)).m6.communication.compresses
