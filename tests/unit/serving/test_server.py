"""``m6 serve`` before it listens: what it refuses, and what it warns of."""

import json
import socket
from pathlib import Path
from unittest import mock

import pytest

from m6.errors import UserError
from tests.fixtures.command import m6, user_error
from tests.fixtures.fabricated_run import write_run, write_run_and_data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    write_run_and_data(folder)
    return folder / "run"


def test_user_errors(run: Path, tmp_path: Path):
    assert "neither a run nor an exported model" in user_error("serve", "--checkpoint", tmp_path, "--port", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = user_error("serve", "--checkpoint", run, "--port", port)
    assert message == f"cannot listen at 127.0.0.1:{port}: Address already in use"
    message = user_error("serve", "--checkpoint", run, "--host", "a..b", "--port", 0)
    assert message == "cannot listen at a..b:0: no name of a host"
    message = user_error("serve", "--checkpoint", run, "--port", 0, "--max-new-tokens", 1000)
    assert message == "max_new_tokens 1000 is more than the model's max_position_embeddings 96"
    for option, value in (("guidance", 2), ("temperature", 1), ("top-k", 3), ("top-p", 0.5), ("passes", 12)):
        message = user_error("serve", "--checkpoint", run, "--port", 0, f"--{option}", value)
        assert message == f"serve: --{option} is for pictures, which the model of {run} does not draw"
    message = user_error("serve", "--checkpoint", run, "--decoding", "left_to_right", "--passes", 3)
    assert message == "passes 3 is for the decoding masked; left_to_right draws one code after the other"


def test_a_model_that_never_captioned_is_announced(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    document = json.loads((run / "config.json").read_text())
    document["m6"]["objectives"] = {"image_captioning": {"weight": 0.0}}
    write_run(tmp_path / "run", document)
    monkeypatch.setattr("uvicorn.Config", mock.Mock(side_effect=UserError("not started")))
    warning = (
        f"warning: {tmp_path / 'run'}: the model does not say that it has learned m6.objectives.image_captioning or "
        "visual_question_answering; its texts may mean nothing"
    )
    for folder, expected in ((run, []), (tmp_path / "run", [warning])):
        outcome = m6("serve", "--checkpoint", folder, "--port", 0)
        assert outcome.stderr.splitlines() == [*expected, "error: not started"]
