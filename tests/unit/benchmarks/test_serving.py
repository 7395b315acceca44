"""The benchmark of the service needs nothing that a fresh clone does not have."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "benchmarks")
    import serving

    return serving


@pytest.mark.slow
def test_it_runs_without_data_in_any_folder(serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving.Recorder, "write", lambda self, header, rows, notes, numbers: written.append(rows))
    monkeypatch.setattr(serving, "LONGEST", 37)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts/benchmarks/serving.py"), "--requests", "3", "--rounds", "1"])
    serving.main()
    by_length, by_arrival, one_by_one = written[0]
    assert one_by_one[2].startswith("3")
    assert by_arrival[2].startswith("1")
    assert by_length[0] == "by length (dynamic programming)"
