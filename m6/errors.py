"""Exceptions for a user's mistakes, and the hint for a misspelled name."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a configuration, a path or a command.

    The command line prints the message, one line without a traceback, and exits with code 2.
    """

    def __str__(self) -> str:
        # Messages quote the user's input. It may hold line breaks and control characters of terminals.
        text = super().__str__()
        if text.isprintable():
            return text
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class RetryableError(UserError):
    """An error outside of the user's configuration: a later attempt may succeed."""


class StorageError(RetryableError):
    """A failed write or read, such as on a full disk.

    A missing or damaged file is another error, since a later attempt would find it again.
    """


DAMAGED = (OSError, ValueError, RuntimeError, TypeError, AttributeError, LookupError, ArithmeticError)
"""The exceptions of libraries for a damaged file: transformers checks few of the types in a model's JSON."""


def first_line(error: BaseException) -> str:
    """The first line of a library's message, or the name of its exception if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def closest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that an unknown one is a misspelling of; upper and lower case count as equal."""
    folded = {each.casefold(): each for each in sorted(valid)}
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    return folded[close[0]] if close else None


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a hint for an unknown name: ``; did you mean "num_layers"?``, or the list of valid names."""
    valid = sorted(valid)
    if (close := closest(name, valid)) is not None:
        return f'; did you mean "{close}"?'
    return f"; valid: {', '.join(valid)}"
