"""The folder of a run: what is recorded of an attempt, and what is not; metrics without duplicates or holes."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import RunConfig, parse_config
from m6.errors import StorageError, UserError
from m6.runs import provenance
from m6.runs.directory import RunDirectory
from tests.fixtures.command import contents
from tests.fixtures.tiny_run import tiny_document


@pytest.fixture
def config(folder: Path) -> RunConfig:
    return parse_config(tiny_document(folder))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "deep" / "run")


def test_an_attempt_is_recorded(run: RunDirectory, config: RunConfig):
    run.check(config)
    assert not run.root.exists(), "checking writes nothing"
    run.open(config, world_size=2)
    assert json.loads((run.root / "config.json").read_text()) == config.document
    attempt = run.root / "provenance" / "attempt_000"
    record = json.loads((attempt / "attempt.json").read_text())
    assert record["world_size"] == 2
    assert "cores" in record["hardware"]
    assert record["command"] == sys.argv
    assert record["packages"].keys() >= {"torch", "deepspeed", "transformers", "safetensors"}
    assert json.loads((attempt / "config.json").read_text()) == config.document


def test_what_a_starting_attempt_writes_first_is_no_other_run(run: RunDirectory, config: RunConfig):
    """A second process looks while the first writes config.json, or after it was killed there."""
    run.root.mkdir(parents=True)
    (run.root / "lock").touch()
    (run.root / ".config.json.x7.tmp").touch()
    run.check(config)
    (run.root / ".other.json.x7.tmp").touch()
    with pytest.raises(UserError, match="is not empty and holds no run"):
        run.check(config)


def test_a_run_that_begins_during_the_check_is_no_other_run(
    run: RunDirectory, config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    """The owner writes config.json between a second process's two looks, and its attempt directly after it."""
    listed = Path.iterdir
    opened = RunDirectory(run.root)
    run.root.mkdir(parents=True)

    def iterdir(folder: Path) -> list[Path]:
        found = list(listed(folder))
        monkeypatch.setattr(Path, "iterdir", listed)
        opened.open(config, 1)
        return found

    monkeypatch.setattr(Path, "iterdir", iterdir)
    run.check(config)
    assert (run.root / "provenance").is_dir()


def test_the_commit_and_what_is_not_committed(run: RunDirectory, config: RunConfig):
    root = Path(__file__).resolve().parents[3]
    git = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True)
    if git.returncode:
        pytest.skip("the sources are no git repository here")
    run.open(config, 1)
    attempt = run.root / "provenance" / "attempt_000"
    assert json.loads((attempt / "attempt.json").read_text())["git_commit"] == git.stdout.strip()
    changed = subprocess.run(["git", "-C", root, "diff", "--quiet", "HEAD"]).returncode == 1
    assert (attempt / "patch.diff").exists() == changed


def test_only_harmless_variables_are_recorded(run: RunDirectory, config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    secrets = {
        "WANDB_API_KEY": "s3cret",
        "HF_TOKEN": "s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "MYSQL_PWD": "s3cret",
        "db_password": "s3cret",
        "SSH_AUTH_SOCK": "s3cret",
        "GH_PAT": "s3cret",
        "SLACK_WEBHOOK": "https://hooks.example/s3cret",
        "SLURM_JWT": "s3cret",
        "NCCL_SECRET": "s3cret",
        "NCCL_DEBUG_PASSWORD": "s3cret",
        "MY_NCCL_DEBUG": "s3cret",
        "GLOO_AUTH_TOKEN": "s3cret",
        "SLURM_JOB_ID_KEY": "s3cret",
        "CONN_STR": "host=db;pw=s3cret",
        "GOOGLE_APPLICATION_CREDENTIALS": "s3cret",
        "HTTPS_PROXY": "http://me:s3cret@proxy:8080",
        "PIP_EXTRA_INDEX_URL": "https://one.example https://__token__:s3cret@two.example/simple",
    }
    plain = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "77", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "ib0"}
    for name, value in (secrets | plain).items():
        monkeypatch.setenv(name, value)
    run.open(config, 1)
    text = (run.root / "provenance" / "attempt_000" / "attempt.json").read_text()
    assert "s3cret" not in text
    recorded = json.loads(text)["environment"]
    assert not recorded.keys() & secrets.keys()
    assert recorded.items() >= plain.items()
    for file in (run.root / "provenance" / "attempt_000").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600, file


def test_changes_that_are_not_committed_stay_private_and_may_have_any_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def call(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    file = tmp_path / "latin_1.txt"
    call("init")
    file.write_bytes(b"caf\n")
    call("add", file.name)
    call("commit", "-m", "a")
    file.write_bytes("café\n".encode("latin-1"))
    patch = provenance.git(tmp_path, "diff", "HEAD")
    assert "+caf\\xe9\n" in patch
    monkeypatch.setattr(provenance, "git", lambda *_: patch)
    monkeypatch.setattr(provenance, "_COPIED", ())
    provenance.take_snapshot(tmp_path / "copy", {})
    assert (tmp_path / "copy" / "patch.diff").read_text() == patch
    assert (tmp_path / "copy" / "patch.diff").stat().st_mode & 0o777 == 0o600


def test_attempts_are_numbered_though_some_were_removed_or_copied(run: RunDirectory, config: RunConfig):
    for _ in range(3):
        run.open(config, 1)
    provenance = run.root / "provenance"
    copy = provenance / "attempt_000_before_the_move"
    copy.mkdir()
    for file in (provenance / "attempt_001").iterdir():
        file.unlink()
    (provenance / "attempt_001").rmdir()
    run.open(config, 1)
    names = ["attempt_000", copy.name, "attempt_002", "attempt_003"]
    assert sorted(path.name for path in provenance.iterdir()) == names


@pytest.mark.parametrize(
    "change",
    [
        {"m6__checkpoint__keep_last": 5},
        {"m6__logging__interval_steps": 7},
        {"m6__evaluation__num_rows": 1},
        {"m6__data__num_workers": 3},
        {"m6__training__ep_size": 2},
        {"m6__moe__exchange": "all_to_all", "m6__moe__ranks_per_node": 4, "m6__moe__overlap_parts": 2},
        {"zero_optimization": {"stage": 2}},
        {"gradient_accumulation_steps": 4},
    ],
)  # fmt: skip
def test_what_may_change_between_attempts(run: RunDirectory, config: RunConfig, folder: Path, change: dict):
    run.open(config, 1)
    run.check(parse_config(tiny_document(folder, **change)))


def test_a_folder_that_cannot_be_made(config: RunConfig):
    run = RunDirectory(Path("/proc/m6/run"))
    with pytest.raises(UserError, match=r"^/proc/m6/run cannot be written: \w+"):
        run.open(config, 1)


def entries(run: RunDirectory) -> list[int]:
    return [entry["step"] for entry in run.read_metrics()]


def test_metrics_are_cut_after_the_step_that_is_resumed(run: RunDirectory):
    run.root.mkdir(parents=True)
    run.cut_metrics_after(3)
    assert contents(run.root) == {}, "there is nothing to cut"
    for step in (1, 2, 2, 3, 4, 5):  # a validation has a line of its own
        run.append_metrics({"step": step})
    run.cut_metrics_after(3)
    assert entries(run) == [1, 2, 2, 3]
    run.append_metrics({"step": 4})
    assert entries(run) == [1, 2, 2, 3, 4]
    run.cut_metrics_after(0)
    assert entries(run) == []


def test_unusable_rows_are_cut_after_the_step_that_is_resumed(run: RunDirectory):
    """Of all ranks, of which the next attempt may have fewer."""
    run.root.mkdir(parents=True)
    run.cut_bad_rows_after(3)
    for rank in (0, 7):
        for step in (2, 3, 3, 4, 10):
            run.list_bad_rows(rank, step, ["texts: row 5: 空\u2028"])
    with (run.root / "bad_rows_rank_00000.txt").open("a") as file:
        file.write("step 1")  # a crash cut it off
    run.cut_bad_rows_after(3)
    run.list_bad_rows(0, 4, ["again"])
    files = [path.read_text().split("\n") for path in sorted(run.root.glob("bad_rows*"))]
    assert [[line[:7] for line in lines] for lines in files] == [
        ["step 2:", "step 3:", "step 3:", "step 4:", ""],
        ["step 2:", "step 3:", "step 3:", ""],
    ]


@pytest.mark.parametrize("half", ['{"step": 3, "loss": 2.', '{"step": 3}', "{", '{"step": 3, "text": "\\u4e'])
def test_a_line_that_a_crash_left_is_dropped(run: RunDirectory, half: str):
    """It may even be complete but for its end of line; the step is done again in any case."""
    run.root.mkdir(parents=True)
    run.append_metrics({"step": 1})
    run.append_metrics({"step": 2})
    with run.metrics.open("a") as file:
        file.write(half)
    assert entries(run) == [1, 2]
    run.cut_metrics_after(2)
    run.append_metrics({"step": 3})
    assert entries(run) == [1, 2, 3]
    assert run.metrics.read_bytes().endswith(b"\n")


def test_a_damaged_line_is_named(run: RunDirectory):
    run.root.mkdir(parents=True)
    run.metrics.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: corrupt"):
        run.read_metrics()


def test_metrics_that_are_not_there(run: RunDirectory):
    with pytest.raises(UserError, match=r"no such file; is .*run the folder of a run\?"):
        run.read_metrics()


def test_a_full_disk_is_told_with_the_folder(run: RunDirectory):
    run.root.mkdir(parents=True)
    (run.root / "bad_rows_rank_00000.txt").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=f"{run.root} cannot be written: No space left on device"):
        run.list_bad_rows(0, 1, ["texts: row 5: empty"])
    run.metrics.symlink_to("/dev/full")
    with pytest.raises(UserError, match=f"{run.root} cannot be written: No space left on device"):
        run.append_metrics({"step": 1})


def test_progress_leaves_nothing_on_a_full_disk(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run.root.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(StorageError):
            run.write_progress(1, 10)
    assert not list(run.root.glob(".progress*"))


def test_progress_is_written_at_most_once_a_second_and_at_the_end(run: RunDirectory):
    run.root.mkdir(parents=True)
    for step in range(1, 11):
        run.write_progress(step, 10)
        recorded = json.loads((run.root / "progress").read_text())
        assert recorded["total_steps"] == 10
        if step in (1, 10):
            assert recorded["step"] == step


def test_how_a_run_ended(run: RunDirectory, config: RunConfig):
    run.open(config, 1)
    run.finish(4)
    assert (run.root / "DONE").read_text() == "4\n"
    run.check(config)  # a finished run may be started again, and has nothing left to do
    run.fail("step 3: loss nan")
    with pytest.raises(UserError, match=r"ended as FATAL: step 3: loss nan. Remove .*FATAL to try again"):
        run.check(config)
    assert not run.stop_requested()
    (run.root / "STOP").touch()
    assert run.stop_requested()


def test_metrics_that_a_checkpoint_outlived(run: RunDirectory):
    run.root.mkdir(parents=True)
    assert run.lost_metrics(0, 1) == ""
    assert run.lost_metrics(9, 10) == "", "the first entry is not due"
    text = f"{run.metrics} is missing, but the checkpoint is of step 10: curves and reports lack what is between"
    assert run.lost_metrics(10, 10) == text
    run.append_metrics({"step": 10})
    assert run.lost_metrics(19, 10) == ""
    assert "ends at step 10, but the checkpoint is of step 20" in run.lost_metrics(20, 10)
    run.metrics.write_bytes(b"\xff\n" + run.metrics.read_bytes())
    assert run.lost_metrics(19, 10) == ""
