"""How long the fuzzers look: half a minute for all of them, and longer at night."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from m6.errors import UserError


def long_and_short(short: int, long: int) -> Callable[[Any], Any]:
    """Parametrizes a test over the number of its examples; the larger one runs at night.

    The test calls ``search(number, function)`` with its ``number``.
    """
    return pytest.mark.parametrize("number", [short, pytest.param(long, marks=[pytest.mark.slow, pytest.mark.nightly])])


def search(number: int, function: Callable[..., None]) -> None:
    """Runs a function that is decorated with ``given`` on a number of examples."""
    # The same examples in every run, so that it does not fail by chance; FUZZ=1 looks elsewhere each time.
    fixed = "FUZZ" not in os.environ
    where = settings(max_examples=number, derandomize=fixed, suppress_health_check=list(HealthCheck))
    where(function)()


def refusal(action: Callable[[], object]) -> str:
    """Returns the message with which an action refuses its input; empty if it accepts it."""
    try:
        action()
    except UserError as error:
        return str(error)
    return ""
