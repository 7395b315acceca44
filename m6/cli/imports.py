"""Quicker imports, where a command's start is most of what a person or a job waits for."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Inside ``with``, garbage is not looked for: torch and transformers make many objects, and all of them stay.

    It takes a seventh of their time. Later collections leave out what was made until then, which saves half a second.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
