"""A reader never sees half of a file, whenever the writer is stopped."""

import errno
import hashlib
import json
import multiprocessing
import os
import pwd
import signal
import tempfile
from pathlib import Path

import pytest

from m6.errors import UserError
from m6.files import atomic_path, cache_folder, sha256, sync, write_json, write_text


def test_a_new_file_is_whole_and_readable_by_others(tmp_path: Path):
    previous = os.umask(0o022)
    try:
        write_text(tmp_path / "deep" / "file", "文字\n")
    finally:
        os.umask(previous)
    file = tmp_path / "deep" / "file"
    assert file.read_bytes() == "文字\n".encode()
    assert file.stat().st_mode & 0o777 == 0o644
    assert list(file.parent.iterdir()) == [file], "no temporary file stays"


@pytest.mark.parametrize(("mode", "expected"), [(0o666, 0o640), (0o600, 0o600)])
def test_permissions_are_those_of_the_umask_which_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, expected: int
):
    """A write that set the umask, if only to read it, could leave another one to a thread that writes meanwhile."""
    file, previous = tmp_path / "file", os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")
            with atomic_path(file, mode) as temporary:
                temporary.with_name("other").touch(0o600)
                temporary.with_name("other").replace(temporary)  # as safetensors does
    finally:
        os.umask(previous)
    assert file.stat().st_mode & 0o777 == expected


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path: Path):
    file = tmp_path / "file"
    write_text(file, "old")

    def write_half() -> None:
        with atomic_path(file) as temporary:
            temporary.write_text("half of the ne")
            assert file.read_text() == "old"
            assert temporary.parent == file.parent, "a rename does not cross file systems"
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_half()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str):
    file = tmp_path / "file"
    write_text(file, "old")

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="No space left"):
        write_text(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_content_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Or a power cut could leave the name with nothing behind it; the folder comes last, which holds the name."""
    file, events = tmp_path / "file", []
    monkeypatch.setattr("m6.files.sync", lambda path: (events.append(("sync", path.name)), sync(path)))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(("rename", Path(new).name)), replace(old, new)))
    write_text(file, "new")
    kinds = [kind for kind, _ in events]
    assert kinds == ["sync", "rename", "sync"]
    assert events[0][1].endswith(".tmp")
    assert events[2] == ("sync", tmp_path.name)


def write_until_killed(file: Path) -> None:
    """Alternates between two long contents."""
    number = 0
    while True:
        write_text(file, str(number % 2) * 1_000_000)
        number += 1


def test_a_killed_writer_leaves_one_of_the_whole_contents(tmp_path: Path):
    file = tmp_path / "file"
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        writer = context.Process(target=write_until_killed, args=(file,))
        writer.start()
        while not file.exists():
            assert writer.is_alive()
        for _ in range(20):  # read while it writes
            assert len(set(file.read_text())) == 1
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        text = file.read_text()
        assert len(text) == 1_000_000
        assert len(set(text)) == 1


def test_json_and_checksums(tmp_path: Path):
    write_json(tmp_path / "a.json", {"名字": [1, 2.5, None]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "名字" in text
    assert text.endswith("}\n")
    assert json.loads(text) == {"名字": [1, 2.5, None]}
    assert sha256(tmp_path / "a.json") == hashlib.sha256(text.encode()).hexdigest()
    big = bytes(range(256)) * 10_000  # more than one block
    (tmp_path / "big").write_bytes(big)
    assert sha256(tmp_path / "big") == hashlib.sha256(big).hexdigest()


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without HOME and without an entry in passwd; the temporary folder."""

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_has_a_cache(homeless: Path):
    with pytest.raises(RuntimeError):
        Path.home()
    folder = cache_folder()
    assert folder.parent == homeless
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder


def test_the_cache_of_a_user_without_a_home_is_nobody_elses(homeless: Path):
    folder = cache_folder()
    folder.chmod(0o777)
    with pytest.raises(UserError, match="others can write it: remove it, or name a folder in XDG_CACHE_HOME"):
        cache_folder()
    folder.rmdir()
    (homeless / "planted").mkdir()
    folder.symlink_to(homeless / "planted")
    with pytest.raises(UserError, match="is a link"):
        cache_folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(homeless / "own"))
        assert cache_folder() == homeless / "own" / "m6-recipes"
