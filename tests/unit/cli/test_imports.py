"""Garbage is not collected during imports, and afterwards as before."""

import gc

import pytest

from m6.cli.process import quick_imports


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


def test_what_was_imported_is_left_out_of_collections():
    gc.unfreeze()
    imported: list[object] = []
    with quick_imports():
        imported.append([])
    assert gc.get_freeze_count() > 0
    assert not any(each is imported[0] for each in gc.get_objects())
