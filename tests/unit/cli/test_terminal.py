"""Bars are for terminals: a log has lines. Names of files are bytes."""

import io
import os

import pytest

from m6.cli.process import keep_bars_out_of_logs, print_any_name

BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stderr", "expected"), [(io.StringIO(), "1"), (Terminal(), None)])
def test_other_packages_draw_bars_in_a_terminal_alone(
    stderr: io.StringIO, expected: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name in BARS:
        monkeypatch.setenv(name, "")  # so that the test leaves nothing behind
        monkeypatch.delenv(name)
    monkeypatch.setattr("sys.stderr", stderr)
    keep_bars_out_of_logs()
    assert [os.environ.get(name) for name in BARS] == [expected, expected]


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch):
    for name in BARS:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    keep_bars_out_of_logs()
    assert [os.environ[name] for name in BARS] == ["0", "0"]


def test_names_that_are_not_in_utf8_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "utf-8"))
    print_any_name()
    print(os.fsdecode(b"\xff.png"), flush=True)
    assert written.getvalue() == b"\xff.png\n"
