"""Uploads, with a stand-in for the Hub."""

from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HTTPError

from m6.errors import UserError
from m6.export import folder
from tests.fixtures.command import m6, user_error
from tests.fixtures.fabricated_run import write_run_and_data


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(folder.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(folder, "get_token", lambda: "token")


@pytest.fixture
def uploads(online, monkeypatch):
    """The calls that reach the Hub's API."""
    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append(("create_repo", name, options))
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            calls.append(("upload_folder", repo_id, sorted(path.name for path in folder_path.iterdir())))
            return SimpleNamespace(commit_url=f"the-hub/{repo_id}")

    monkeypatch.setattr(folder, "HfApi", Api)
    return calls


def test_the_folder_is_uploaded_to_a_private_repository(uploads, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert folder.push(tmp_path, "model") == "the-hub/me/model"
    assert uploads == [
        ("create_repo", "model", {"private": True, "exist_ok": True}),
        ("upload_folder", "me/model", ["config.json"]),
    ]


def test_the_command_exports_and_uploads(uploads, tmp_path):
    write_run_and_data(tmp_path)
    ended = m6("export", tmp_path / "run", "--hf", tmp_path / "hf", "--push", "model")
    assert ended.stdout == f"{tmp_path / 'hf'}\nthe-hub/me/model\n"
    assert {"README.md", "config.json", "model.safetensors", "modeling_m6.py"} <= set(uploads[1][2])


def test_mistakes_are_found_before_the_export(monkeypatch, tmp_path):
    def refused(name):
        message = user_error("export", tmp_path / "run", "--hf", tmp_path / "hf", "--push", name)
        assert not (tmp_path / "hf").exists()
        return message

    monkeypatch.setattr(folder.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused("me/model")
    assert "'a/b/c'" in refused("a/b/c")
    monkeypatch.setattr(folder.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(folder, "get_token", lambda: None)
    assert "hf auth login" in refused("me/model")


@pytest.mark.parametrize("error", [HTTPError("403 Forbidden\nmore"), ConnectionError("no route")])
def test_a_failed_upload_says_how_to_go_on(online, monkeypatch, tmp_path, error):
    def fail(self, name, **options):
        raise error

    monkeypatch.setattr(folder.HfApi, "create_repo", fail)
    with pytest.raises(UserError, match=f"{str(error).splitlines()[0]}; the model is in .*hf upload me/model"):
        folder.push(tmp_path, "me/model")
