"""What every command has: help by both flags, the version, completion."""

import pytest

from m6 import __version__
from tests.fixtures.command import m6


def test_the_version():
    outcome = m6("--version")
    assert (outcome.code, outcome.stdout) == (0, f"m6-recipes {__version__}\n")


@pytest.mark.parametrize("command", [[], ["pretrain"], ["data", "build"], ["plan", "best"], ["serve"]])
def test_help_by_its_short_flag(command: list[str]):
    short, long = m6(*command, "-h"), m6(*command, "--help")
    assert short.code == 0
    assert short == long
    assert "Usage" in short.stdout


def test_completion_for_a_shell():
    outcome = m6("--show-completion", "bash")
    assert outcome.code == 0
    assert "_M6_COMPLETE" in outcome.stdout or "complete" in outcome.stdout
