"""The exceptions for a user's mistakes, and the hint that goes with them."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a configuration, a path or a command.

    The command line prints its message without a traceback and exits with code 2.
    """


class StorageError(UserError):
    """A disk that could not be written to. Unlike other mistakes it may be gone at the next attempt."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a hint such as ``; did you mean "num_layers"?``, or a list of what is valid."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; valid: {', '.join(valid)}"
