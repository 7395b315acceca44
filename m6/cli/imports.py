"""Faster imports, as imports take most of the time of a command's start."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Inside ``with``, Python's garbage collection is off: torch and transformers make many objects, all of them live.

    Without it imports take a seventh less time. Afterwards all objects are frozen: later collections skip them, and
    that saves half a second.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
