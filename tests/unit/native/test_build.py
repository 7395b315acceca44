"""The build of C++ libraries: once, by processes side by side, and what happens where it fails."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from native import load_library, remembered

SOURCE = 'extern "C" int add(int left, int right) { return left + right; }\n'
FLAGS = ("-O1", "-fPIC", "-shared")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    path = tmp_path / "add.cpp"
    path.write_text(SOURCE)
    return path


def load(source: Path, flags: tuple[str, ...] = FLAGS):
    return load_library(source, flags, ("g++", "clang++"), "addition is slower")


def test_it_is_built_once(source: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:  # side by side, as ranks do
        libraries = list(pool.map(lambda _: load(source), range(3)))
    assert [library.add(2, 3) for library in libraries] == [5, 5, 5]
    (built,) = (tmp_path / "cache").rglob("*.so")
    before = built.stat().st_mtime_ns
    load(source)
    assert built.stat().st_mtime_ns == before
    assert sorted(path.name for path in built.parent.iterdir()) == [built.name], "temporary files are left"


def test_a_users_group_is_no_obstacle(source: Path, tmp_path: Path) -> None:
    """Debian gives each user a group of their own, and a umask by which that group may write."""
    before = os.umask(0o002)
    try:
        (tmp_path / "cache" / "m6-recipes").mkdir(parents=True)  # by another part of the project
        assert load(source).add(2, 3) == 5
    finally:
        os.umask(before)


def test_a_file_system_without_links(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    assert load(source).add(2, 3) == 5


@pytest.mark.parametrize("change", ["source", "flags", "compiler"])
def test_another_content_is_another_library(source: Path, tmp_path: Path, monkeypatch, change: str) -> None:
    load(source)
    if change == "source":
        source.write_text(SOURCE.replace("left + right", "left - right"))
    if change == "compiler":
        monkeypatch.setenv("CXX", "g++ -fno-plt")
    library = load(source, ("-O2", *FLAGS) if change == "flags" else FLAGS)
    assert library.add(2, 3) == (-1 if change == "source" else 5)
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 2


@pytest.mark.parametrize(
    ("compiler", "flags", "reason"),
    [
        ("/nowhere/c++", FLAGS, r"/nowhere/c\+\+"),
        ("g++", ("-no-such-flag",), "-no-such-flag"),
    ],
)
def test_what_fails_is_a_warning(source: Path, tmp_path: Path, monkeypatch, compiler, flags, reason) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=rf"(?s)^addition is slower, .*{reason}"):
        assert load(source, flags) is None
    assert list((tmp_path / "cache").rglob("*.so")) == []


def test_a_machine_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match="install g"):
        assert load(source) is None


def test_a_build_can_be_forbidden(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M6_RECIPES_BUILD", "0")
    with pytest.warns(UserWarning, match=r"^addition is slower, .*M6_RECIPES_BUILD is 0, and there is no .*add_.*\.so"):
        assert load(source) is None
    assert not (tmp_path / "cache").exists()
    monkeypatch.delenv("M6_RECIPES_BUILD")
    load(source)
    monkeypatch.setenv("M6_RECIPES_BUILD", "0")
    assert load(source).add(2, 3) == 5  # what was built before may be used


@pytest.mark.parametrize("change", ["folder", "file", "link"])
def test_what_another_user_could_have_written_is_not_loaded(source: Path, tmp_path: Path, change: str) -> None:
    assert load(source) is not None
    (built,) = (tmp_path / "cache").rglob("*.so")
    if change == "folder":
        built.parent.chmod(0o777)
    elif change == "file":
        built.chmod(0o775)
    else:
        built.rename(tmp_path / "planted.so")
        built.symlink_to(tmp_path / "planted.so")
    with pytest.warns(UserWarning, match="can be written by others"):
        assert load(source) is None


def test_another_users_file_is_not_loaded(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(source) is not None
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert load(source) is None


def test_an_answer_is_that_of_the_first_process_that_asked(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load(source)
    assert library is not None
    with ThreadPoolExecutor() as pool:
        answers = set(pool.map(lambda number: remembered(library, "question", lambda: str(number), "none"), range(8)))
    assert len(answers) == 1
    assert remembered(library, "question", lambda: "another", "none") in answers
    assert remembered(library, "another question", lambda: "another", "none") == "another"

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "link", refuse)
    assert remembered(library, "a third question", lambda: "mine alone", "none") == "none"
