"""A folder has one owner, and a lock ends with its process however that ends."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from m6.errors import StorageError, UserError
from m6.lock import FolderInUse, FolderLock, new_folder

ROOT = Path(__file__).resolve().parents[2]
OWNER = r"""
import os, sys, time
from pathlib import Path
from m6.lock import FolderLock
lock = FolderLock(Path(sys.argv[1], "lock"), Path(sys.argv[1]))
lock.acquire()
if sys.argv[2] == "fork" and os.fork() == 0:
    os.write(1, f"{os.getpid()}\n".encode())  # at once, since both processes write to the same pipe
    time.sleep(60)
os.write(1, b"held\n")
time.sleep(60)
"""


@pytest.fixture
def start_owner(tmp_path: Path):
    started: list[subprocess.Popen] = []

    def start(how: str = "alone") -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", OWNER, tmp_path, how]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_patient_process_waits_for_the_owner(
    tmp_path: Path, start_owner: Callable[..., subprocess.Popen], monkeypatch: pytest.MonkeyPatch
):
    owner = start_owner()
    assert owner.stdout is not None
    owner.stdout.readline()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            owner.kill()
            owner.wait()

    monkeypatch.setattr("m6.lock.time.sleep", wait)
    lock = FolderLock(tmp_path / "lock", tmp_path)
    lock.acquire(patience_s=600.0)
    lock.release()
    assert len(waits) == 2


def test_a_second_process_is_told_who_the_owner_is(tmp_path: Path, start_owner: Callable[..., subprocess.Popen]):
    owner = start_owner()
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(FolderInUse, match=rf"{tmp_path} is being written by process {owner.pid} on .* since"):
        FolderLock(tmp_path / "lock", tmp_path).acquire()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    with FolderLock(tmp_path / "lock", tmp_path):
        pass
    assert not (tmp_path / "lock").exists()


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path, start_owner: Callable[..., subprocess.Popen]):
    owner = start_owner("fork")
    assert owner.stdout is not None
    lines = sorted([owner.stdout.readline().strip(), owner.stdout.readline().strip()])
    worker = int(lines[0])
    try:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        os.kill(worker, 0)  # the worker lives on
        FolderLock(tmp_path / "lock", tmp_path).acquire()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_an_unreadable_owner(tmp_path: Path, start_owner: Callable[..., subprocess.Popen]):
    owner = start_owner()
    assert owner.stdout is not None
    owner.stdout.readline()
    (tmp_path / "lock").write_bytes(b"\xff[")
    with pytest.raises(FolderInUse, match="another process"):
        FolderLock(tmp_path / "lock", tmp_path).acquire()


def test_a_lock_file_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        FolderLock(tmp_path / "file" / "lock", tmp_path).acquire()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be written"):
        FolderLock(tmp_path / "link", tmp_path).acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    lock = FolderLock(tmp_path / "lock", tmp_path)
    lock.acquire()
    assert "has no locks" in capsys.readouterr().err
    lock.release()


def test_a_lock_file_that_its_owner_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Who opened the file just before its owner removed it must not own a file that no one else will find."""
    open_file, opened = FolderLock._open, []

    def open_and_lose(self: FolderLock) -> int:
        opened.append(open_file(self))
        if len(opened) == 1:
            (tmp_path / "lock").unlink()
        return opened[-1]

    monkeypatch.setattr(FolderLock, "_open", open_and_lose)
    with FolderLock(tmp_path / "lock", tmp_path):
        assert len(opened) == 2
        assert os.path.samestat(os.fstat(opened[-1]), (tmp_path / "lock").stat())


def test_a_new_folder_has_its_name_only_when_it_is_complete(tmp_path: Path):
    out = tmp_path / "out"
    with new_folder(out) as partial:
        (partial / "file").write_text("x")
        assert not out.exists()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["out", "out/file"]
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "other"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path):
    out = tmp_path / "o[u]t"
    kept = [tmp_path / name for name in ("o[u]t.partial-mine", "out.partial-7", "o[u]t2.partial-7")]
    for folder in (*kept, tmp_path / "o[u]t.partial-4000000"):
        (folder / "train").mkdir(parents=True)
    with new_folder(out) as partial:
        assert sorted(tmp_path.glob("*partial*")) == sorted([*kept, partial])


@pytest.mark.parametrize("failing", ["sync_folder", "os.replace"])
def test_an_old_folder_stays_until_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(f"m6.lock.{failing}", fail)
        with pytest.raises(OSError, match="No space"), new_folder(out, replaces=True) as partial:
            (partial / "file").write_text("new")
    assert (out / "file").read_text() == "old"
    with new_folder(out, replaces=True) as partial:
        (partial / "file").write_text("new")
    assert (out / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_old_folder_whose_successor_was_killed_comes_back(tmp_path: Path):
    (tmp_path / "out.replaced-4000000").mkdir()
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out", replaces=True):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_another_process_writes_is_left_alone(
    tmp_path: Path, start_owner: Callable[..., subprocess.Popen]
):
    owner = start_owner()  # of tmp_path / "lock"
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    (tmp_path / "lock").rename(tmp_path / "out.lock")
    (tmp_path / f"out.partial-{owner.pid}").mkdir()
    with pytest.raises(FolderInUse, match=f"out is being written by process {owner.pid}"), new_folder(tmp_path / "out"):
        pass
    assert (tmp_path / f"out.partial-{owner.pid}").is_dir()


def test_a_lock_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(StorageError, match="lock cannot be written: No space left"):
        FolderLock(tmp_path / "lock", tmp_path).acquire()
    assert not (tmp_path / "lock").exists()
