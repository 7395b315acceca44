"""Test rows that training does not hold: a score on the others would measure memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m6.data.overlap import Contents

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

    ``m6.data.overlap`` compares them: also a resized or recompressed picture is found.
    """
    own = _contents(rows)
    shared = own.shared_with(_contents(training))
    # Pictures may have the captions of others: they are still unseen.
    seen = shared["group"] | shared["picture"] | (shared["text"] & ~own.has_picture)
    left_out = int(seen.sum())
    if left_out == len(rows):
        return HeldOut(
            list(rows), "Training holds the picture, text or group of every test row: the scores measure memory."
        )
    remark = f"{left_out} of {len(rows)} test rows are left out: training holds their picture, text or group."
    return HeldOut([row for row, known in zip(rows, seen, strict=True) if not known], remark if left_out else "")


def _contents(rows: Rows) -> Contents:
    contents = Contents()
    for row in rows:
        contents.add(row["group"], row["text"], row["image"], row["answer"])
    return contents
