"""Bars are for terminals: a log has lines."""

import io
import os

import pytest

from m6.cli.terminal import keep_bars_out_of_logs

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
