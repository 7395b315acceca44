"""What held-out rows share with training rows of which only a part is in memory at a time."""

import numpy as np
import pytest

from m6.data import overlap
from m6.data.overlap import Contents, count_groups, known_keys
from tests.fixtures.photographs import file_of, photograph


def contents(rng: np.random.Generator, rows: int) -> Contents:
    """Rows with some of a few groups, texts and pictures, or without text or picture."""
    made = Contents()
    for group, text, picture in rng.integers(0, 40, (rows, 3)):
        image = file_of(photograph(picture, 32, 24)) if picture < 20 else None
        made.add(f"group {group}", f"text {text}" if text < 30 else "", image, None)
    return made


@pytest.mark.parametrize("most_compared", [1000, 10])
def test_training_rows_in_parts_share_what_they_share_together(monkeypatch: pytest.MonkeyPatch, most_compared: int):
    monkeypatch.setattr(overlap, "MAX_COMPARED", most_compared)
    rng = np.random.default_rng(0)
    for rows in (0, 3, 10):
        held_out, parts = contents(rng, rows), [contents(rng, 12) for _ in range(3)]
        whole, reduced = Contents(), Contents()
        for part in parts:
            whole.add_state(part.state())
            reduced.add_state(part.state(), known_keys([held_out, Contents()]))
        expected, found = held_out.shared_with(whole), held_out.shared_with(reduced)
        assert {kind: list(shared) for kind, shared in found.items()} == {
            kind: list(shared) for kind, shared in expected.items()
        }


def test_groups_are_counted_once():
    rng = np.random.default_rng(0)
    parts = [contents(rng, 30) for _ in range(3)]
    groups = [part.state()["keys"][2].tolist() for part in parts]
    assert count_groups(iter(parts)) == len({key for keys in groups for key in keys})
    assert count_groups([Contents(), Contents()]) == 0
