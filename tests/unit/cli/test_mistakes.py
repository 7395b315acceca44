"""Folders, disks and files that cannot be used: one line on stderr, exit code 2, and nothing is changed."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m6.checkpoints.format import MANIFEST
from tests.fixtures.command import contents, m6, user_error
from tests.fixtures.fabricated_run import (
    change_state,
    run_document,
    training_entry,
    write_metrics,
    write_run_and_data,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny data, its tokenizer, and a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("bad_input")
    write_run_and_data(folder)
    return folder


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    return shutil.copytree(data / "run", tmp_path / "run")


@pytest.fixture
def pretrain(data: Path, tmp_path: Path) -> Callable[..., str]:
    """Calls ``m6 pretrain`` with the run's JSON and overrides; returns its message."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(run_document(data / "data", data / "tokenizer")))

    def call(run: Path, *overrides: str) -> str:
        before = contents(run)
        options = [argument for override in overrides for argument in ("--set", override)]
        text = user_error("pretrain", config, "--run-dir", run, *options)
        assert contents(run) == before
        return text

    return call


CHANGES = [
    ("m6.model.hidden_size=64", "its m6.model.hidden_size is 32, this one's is 64"),
    ("m6.moe.num_experts=8", "its m6.moe.num_experts is 4, this one's is 8"),
    ("m6.data.sources.tiny_text=1", "its m6.data.sources is None"),
    ("m6.data.sequence_length=64", "its m6.data.sequence_length is 96, this one's is 64"),
    ("m6.training.seed=6", "its m6.training.seed is 5, this one's is 6"),
    ("m6.training.total_steps=99", "its m6.training.total_steps is 100, this one's is 99: a run can only"),
    ("m6.schedule.warmup_steps=2", "its m6.schedule.warmup_steps is 1, this one's is 2"),
    ("optimizer.params.lr=0.01", "its optimizer.params.lr is 0.001, this one's is 0.01"),
    ("gradient_clipping=2.0", "its gradient_clipping is 1.0, this one's is 2.0"),
    ("train_batch_size=8", "its train_batch_size is 4, this one's is 8"),
    ('torch_autocast={"enabled": true, "dtype": "bfloat16"}', "its torch_autocast is None"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "expected"), CHANGES)
def test_a_folder_that_holds_another_run(pretrain: Callable[..., str], run: Path, override: str, expected: str):
    text = pretrain(run, override)
    assert f"{run} already holds another run ({expected}" in text
    assert "choose another --run-dir" in text


def test_a_folder_that_holds_no_run(pretrain: Callable[..., str], tmp_path: Path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.txt").write_text("")
    assert f"{folder} is not empty and holds no run" in pretrain(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"m6": 3}', "{}", "\0"])
def test_a_run_whose_configuration_is_damaged(pretrain: Callable[..., str], run: Path, text: str):
    (run / "config.json").write_text(text)
    assert f"{run / 'config.json'}: corrupt" in pretrain(run)


def test_a_file_where_the_folder_should_be(pretrain: Callable[..., str], tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    assert f"{file} is a file" in pretrain(file)
    assert f"{file / 'run'} cannot be written: {file} is a file" in pretrain(file / "run")


def test_a_folder_that_is_read_only(pretrain: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Permissions do not hold for root, who may be running this.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    root = tmp_path / "deep" / "run"
    assert pretrain(root) == f"{root} cannot be written: {tmp_path} is read-only"


def test_a_run_that_ended_as_fatal(pretrain: Callable[..., str], run: Path):
    (run / "FATAL").write_text("step 7: loss nan\n")
    assert f"{run} ended as FATAL: step 7: loss nan. Remove {run / 'FATAL'} to try again" == pretrain(run)


def test_another_tokenizer_than_that_of_the_checkpoint(pretrain: Callable[..., str], run: Path):
    folder = change_state(run, tokenizer="0123456789abcdef")
    text = pretrain(run)
    assert f"m6.data.tokenizer is not the one that {folder} was trained with" in text
    assert "instead of 0123456789ab" in text


def test_a_restart_from_a_model_of_another_tokenizer(run: Path, data: Path, tmp_path: Path):
    """The run has checkpoints, but begins with the initial weights again, which may have changed since."""
    init, config = shutil.copytree(run, tmp_path / "init"), tmp_path / "config.json"
    document = run_document(data / "data", data / "tokenizer")
    document["m6"]["init"] = str(init)
    for file in (config, run / "config.json"):
        file.write_text(json.dumps(document))
    change_state(init, tokenizer="0123456789abcdef")
    before = contents(run)
    text = user_error("finetune", config, "--init", init, "--run-dir", run, "--restart")
    assert f"m6.data.tokenizer is not the one that {init} was trained with" in text
    assert contents(run) == before


def test_data_without_rows(pretrain: Callable[..., str], data: Path, tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()
    manifest = json.loads((data / "data" / "manifest.json").read_text())
    for source in manifest["sources"].values():
        source["splits"] = {}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert f'{folder} has no rows in split "train"' in pretrain(tmp_path / "new", f"m6.data.path={folder}")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_is_full_or_failing(pretrain: Callable[..., str], tmp_path: Path, monkeypatch, code: int):
    """Before the first byte; test_checkpointing.py has the full disk during a run."""

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    root = tmp_path / "new"
    config = tmp_path / "config.json"
    said = user_error("pretrain", config, "--run-dir", root)
    assert said == f"{root} cannot be written: {os.strerror(code)} ({root / 'config.json'})"
    assert contents(root) == {}, "the lock is gone too"


def test_a_precision_that_the_machine_has_not(pretrain: Callable[..., str], tmp_path: Path, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    overrides = ("fp16.enabled=true", "zero_optimization.stage=2")
    assert "fp16.enabled: the cpu of this machine" in pretrain(tmp_path / "new", *overrides)


USAGE = [
    ([], "Usage"),
    (["pretrain"], "Missing argument"),
    (["pretrain", "a.json", "--run"], "--run"),
    (["pretrian", "a.json"], "No such command"),
    (["generate", "a prompt"], "--checkpoint"),
    (["serve", "--checkpoint", "x", "--deadline", "inf"], "--deadline must be from 0.001 to 86400 seconds, found inf"),
    (["serve", "--checkpoint", "x", "--deadline", "nan"], "--deadline must be from 0.001 to 86400 seconds, found nan"),
    (["serve", "--checkpoint", "x", "--threads", "1000000"], "--threads is 1,000,000; expected at most "),
    (["data", "tokenizer", "x", "--out", "y", "--vocab-size", "1000000000000"], "--vocab-size"),
    (["data", "tokenizer", "x", "--out", "y", "--image-vocab-size", "1000000000000"], "--image-vocab-size"),
    (["generate", "--checkpoint", "x", "a prompt", "--num-beams", "0"], "--num-beams"),
    (["evaluate", "x", "--rows", "many"], "--rows"),
    (["data", "build"], "Missing argument"),
]


@pytest.mark.parametrize(("arguments", "expected"), USAGE)
def test_a_command_that_is_not_well_formed(arguments: list[str], expected: str):
    outcome = m6(*arguments, NO_COLOR="1")
    assert outcome.code == 2
    assert expected in outcome.stderr + outcome.stdout
    assert "Traceback" not in outcome.stderr


def test_generate_needs_a_prompt_or_a_picture(run: Path):
    assert "give a text to continue, or --image" in user_error("generate", "--checkpoint", run)


@pytest.mark.parametrize("content", [None, b"", b"no picture", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "folder"])
def test_generate_with_a_picture_that_cannot_be_read(run: Path, tmp_path: Path, content: Any):
    picture = tmp_path / "picture.png"
    if content == "folder":
        picture.mkdir()
    elif content is not None:
        picture.write_bytes(content)
    text = user_error("generate", "--checkpoint", run, "--image", picture)
    assert text.startswith(f"{picture}: {'no such file' if content is None else 'not a readable picture'}")


def test_commands_on_a_folder_that_is_no_run(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "missing"):
        before = contents(tmp_path)
        assert f"{folder}: neither a run nor an exported model" in user_error(
            "generate", "--checkpoint", folder, "a prompt"
        )
        assert f"{folder / 'config.json'}: no such file" in user_error("evaluate", folder)
        assert f"{folder / 'config.json'}: no such file" in user_error("export", folder, "--hf", tmp_path / "hf")
        assert f"is {folder} the folder of a run?" in user_error("plot", folder)
        assert contents(tmp_path) == before


def test_commands_on_an_exported_model(run: Path, tmp_path: Path):
    assert m6("export", run, "--hf", tmp_path / "hf").code == 0
    expected = (
        f"{tmp_path / 'hf' / 'config.json'}: belongs to an exported model; expected the JSON or the folder of a run"
    )
    for arguments in (["evaluate"], ["downstream"]):
        assert user_error(*arguments, tmp_path / "hf") == expected
    assert user_error("export", tmp_path / "hf", "--hf", tmp_path / "other") == expected
    assert "holds an exported model; expected the folder of a run" in user_error("status", tmp_path / "hf")


def test_commands_on_a_run_without_a_checkpoint(run: Path, tmp_path: Path):
    (run / "checkpoints" / "step_00000100" / MANIFEST).unlink()
    before = contents(tmp_path)
    for arguments in (
        ["generate", "--checkpoint", run, "a prompt"],
        ["evaluate", run],
        ["export", run, "--hf", tmp_path / "hf"],
    ):
        assert user_error(*arguments) == f"{run / 'checkpoints'} holds no complete checkpoint"
    assert contents(tmp_path) == before


def test_export_does_not_touch_what_is_there(run: Path, tmp_path: Path):
    out = tmp_path / "hf"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"mine")
    before = contents(out)
    assert user_error("export", run, "--hf", out) == f"{out} exists and is not an empty folder; choose another one"
    assert contents(out) == before
    assert 'did you mean "float32"' in user_error("export", run, "--hf", tmp_path / "new", "--dtype", "float23")


def test_plot_of_metrics_that_are_missing_or_damaged(run: Path):
    assert f"{run / 'metrics.jsonl'}: no such file" in user_error("plot", run)
    (run / "metrics.jsonl").write_text("")
    assert "holds no training metrics yet" in user_error("plot", run)
    (run / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    assert f"{run / 'metrics.jsonl'}, line 1: corrupt" in user_error("plot", run)
    assert not (run / "curves.png").exists()


def test_plot_while_a_line_is_being_written(run: Path):
    write_metrics(run, [training_entry(step, {"language_modelling": 5.0}) for step in (1, 2)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert m6("plot", run).code == 0


def test_an_output_that_cannot_be_written(run: Path):
    write_metrics(run, [training_entry(1, {"language_modelling": 5.0})])
    file = run / "config.json"
    assert f"{file / 'curves.png'}: cannot be written: {file} is a file" in user_error(
        "plot", run, "--out", file / "curves.png"
    )


@pytest.mark.parametrize("command", ["evaluate", "downstream", "evaluate-tasks"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    # There is no run: that would be the next complaint.
    message = user_error(command, tmp_path / "run", "--out", tmp_path / "file" / "x.md")
    assert f"--out {tmp_path / 'file/x.md'}: cannot be written: {tmp_path / 'file'} is a file; expected the " in message
    # Permissions do not hold for root, who may be running this.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    message = user_error(command, tmp_path / "run", "--out", tmp_path / "deep" / "x.md")
    assert f"--out {tmp_path / 'deep/x.md'}: cannot be written: {tmp_path} is read-only; expected the " in message


@pytest.mark.slow
def test_a_process_of_its_own_ends_the_same_way(pretrain: Callable[..., str], tmp_path: Path):
    """DeepSpeed is loaded on the way, and would like to say things about the machine."""
    config = tmp_path / "config.json"
    document = json.loads(config.read_text()) | {"zero_optimization": {"stage": 2, "overlap_com": True}}
    config.write_text(json.dumps(document))
    command = [sys.executable, "-m", "m6", "pretrain", str(config)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DS_")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    expected = 'zero_optimization.overlap_com: unknown key; did you mean "overlap_comm"?'
    assert ended.stderr == f"error: {config}: {expected}\n"
    assert list(tmp_path.iterdir()) == [config]
