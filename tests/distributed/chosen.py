"""Of the runs that a module trains once for many tests: which ones the chosen tests need."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(names: Iterable[str], nightly: Collection[str]) -> list[Any]:
    """Parameters ``name`` of a test, some of which run at night only.

    Those by day hold each part of the module's code; that their features go together with all others is what
    test_feature_pairs.py tests.
    """
    return [pytest.param(name, marks=pytest.mark.nightly) if name in nightly else name for name in names]


def chosen(request: pytest.FixtureRequest) -> set[str]:
    """The parameters ``name`` of the chosen tests in the module of a fixture."""
    found = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    return {each.params["name"] for each in found if each is not None and "name" in each.params}
