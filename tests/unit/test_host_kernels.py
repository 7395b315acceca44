"""Kernels that are compiled at first use."""

import ctypes
import multiprocessing
from pathlib import Path

import pytest

from host_kernels import load_kernel

SOURCE = 'extern "C" int answer() { return NUMBER; }'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "answer.cpp"
    file.write_text(SOURCE, encoding="utf-8")
    return file


def libraries(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "m6-recipes").iterdir())


def call(source: Path) -> int:
    library = load_kernel(source, ("-DNUMBER=42",), "no answer")
    assert isinstance(library, ctypes.CDLL)
    return library.answer()


def test_processes_compile_side_by_side_and_leave_one_library(source: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.map(call, [source] * 3) == [42] * 3
    (library,) = libraries(source)
    before = library.stat().st_mtime_ns
    assert call(source) == 42
    assert libraries(source) == [library]
    assert library.stat().st_mtime_ns == before
    source.write_text(SOURCE + "  // changed", encoding="utf-8")
    assert call(source) == 42
    assert len(libraries(source)) == 2


def test_what_cannot_be_compiled_is_a_warning_with_the_reason(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"(?s)no answer, since answer.cpp could not be built: .*NUMBER"):
        assert load_kernel(source, (), "no answer") is None
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.warns(UserWarning, match=r"no answer, .*/nowhere/c\+\+"):
        assert load_kernel(source, ("-DNUMBER=42",), "no answer") is None
    assert libraries(source) == []
