"""The one exception for a user's mistake, and the hint that goes with it."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a configuration, a path or a command.

    The command line prints its message without a traceback and exits with code 2.
    """


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a hint such as ``; did you mean "num_layers"?``, or a list of what is valid."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; valid: {', '.join(valid)}"
