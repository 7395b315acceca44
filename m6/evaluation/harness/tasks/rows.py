"""The rows of the tasks. lm-evaluation-harness loads this file by path and passes the metadata of the run."""

from __future__ import annotations

from typing import Any

import datasets

from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.errors import UserError


def reviews(data: str, **_: Any) -> dict[str, datasets.Dataset]:
    """The test split of the source ``reviews``: ``text``, and ``answer`` (好评 or 差评)."""
    return {"test": _test_split(data, "reviews", ["text", "answer"])}


def news(data: str, **_: Any) -> dict[str, datasets.Dataset]:
    """The test split of the source ``inews``: ``text``."""
    return {"test": _test_split(data, "inews", ["text"])}


def _test_split(data: str, source: str, columns: list[str]) -> datasets.Dataset:
    manifest = Manifest.load(data)
    if not manifest.split(source, "test").rows:
        raise UserError(f'{data}: the source "{source}" has no rows in split "test"')
    rows = open_split(manifest, source, "test", columns)
    return datasets.Dataset.from_dict({column: rows.column(column) for column in columns})
