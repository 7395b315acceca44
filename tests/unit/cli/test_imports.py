"""Garbage is not collected during imports, and afterwards as before."""

import gc

import pytest

from m6.cli.imports import quick_imports


@quick_imports()
def fails() -> None:
    assert not gc.isenabled()
    raise ImportError


@pytest.mark.parametrize("collects", [True, False])
def test_collection_is_as_before_even_after_an_error(collects: bool):
    if not collects:
        gc.disable()
    try:
        with pytest.raises(ImportError):
            fails()
        assert gc.isenabled() == collects
    finally:
        gc.enable()
