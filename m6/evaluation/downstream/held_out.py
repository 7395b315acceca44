"""Test rows that training does not hold: a score on the others would measure memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m6.data.duplicates import near_duplicates, signature

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class HeldOut:
    """The rows to score.

    Attributes:
        rows: test rows that training does not hold; all of them if it holds every one.
        remark: for the report, what was left out; empty if nothing was.
    """

    rows: list[dict[str, Any]]
    remark: str


def held_out(rows: Rows, training: Rows) -> HeldOut:
    """Leaves out test rows whose group, picture or, without a picture, text is in the training rows.

    Pictures are compared by ``m6.data.duplicates``: also a resized or recompressed picture is found.
    """
    groups = {row["group"] for row in training}
    contents = {_content(row) for row in training}
    seen = np.array([row["group"] in groups or _content(row) in contents for row in rows])
    pictures = [number for number, row in enumerate(rows) if row["image"] is not None and not seen[number]]
    others = [row["image"] for row in training if row["image"] is not None]
    if pictures and others:
        own = np.stack([signature(rows[number]["image"]) for number in pictures])
        for number, _ in near_duplicates(own, np.stack([signature(picture) for picture in others])):
            seen[pictures[number]] = True
    left_out = int(seen.sum())
    if left_out == len(rows):
        return HeldOut(
            list(rows), "Training holds the picture, text or group of every test row: the scores measure memory."
        )
    remark = f"{left_out} of {len(rows)} test rows are left out: training holds their picture, text or group."
    return HeldOut([row for row, known in zip(rows, seen, strict=True) if not known], remark if left_out else "")


def _content(row: dict[str, Any]) -> bytes:
    return hashlib.sha256(row["image"] or " ".join(row["text"].split()).encode()).digest()
