"""Near duplicates against the comparison of all pairs, on pictures that are far apart, alike, and in chains."""

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from m6.data.overlap import has_near_duplicate, join_near_duplicates

Signatures = NDArray[np.uint8]


def all_near(signatures: Signatures, others: Signatures) -> NDArray[np.bool_]:
    return np.abs(signatures[:, None].astype(int) - others[None].astype(int)).max(axis=2) <= 8


def slowly_joined(signatures: Signatures, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    near = all_near(signatures, signatures) | (groups[:, None] == groups[None])
    joined = np.arange(len(signatures))
    while True:
        least = np.where(near, joined[None], len(joined)).min(axis=1)
        if (least == joined).all():
            return joined
        joined = least


def noisy(rng: np.random.Generator, scenes: Signatures, noise: int) -> Signatures:
    return np.clip(scenes + rng.integers(-noise, noise + 1, scenes.shape), 0, 255).astype(np.uint8)


def drawn(kind: str, rng: np.random.Generator, rows: int) -> Signatures:
    scenes = rng.integers(0, 256, (8, 304))
    if kind == "far":
        return rng.integers(0, 256, (rows, 304), dtype=np.uint8)
    if kind == "one":  # a camera that does not move: all are near duplicates
        return noisy(rng, scenes[np.zeros(rows, dtype=int)], 4)
    if kind == "equal colours":
        signatures = noisy(rng, scenes[rng.integers(0, 8, rows)], 6)
        signatures[:, 256:] = signatures[0, 256:]
        return signatures
    if kind == "alike":  # some pairs are just near, and some just not
        return noisy(rng, scenes[rng.integers(0, 8, rows)], 5)
    return np.clip(scenes[0] + 5 * np.arange(rows)[:, None] // 2, 0, 255).astype(np.uint8)[rng.permutation(rows)]


@pytest.mark.parametrize("kind", ["far", "one", "equal colours", "alike", "chain"])
@pytest.mark.parametrize("rows", [1, 5, 90])
def test_near_duplicates_are_those_of_all_pairs(kind: str, rows: int):
    rng = np.random.default_rng(rows)
    signatures, others = drawn(kind, rng, rows), drawn(kind, np.random.default_rng(rows), 70)
    groups = np.arange(rows)
    if rows > 5:
        groups[3] = groups[5] = 1
    np.testing.assert_array_equal(join_near_duplicates(signatures, groups), slowly_joined(signatures, groups))
    np.testing.assert_array_equal(has_near_duplicate(signatures, others), all_near(signatures, others).any(axis=1))


@pytest.mark.slow
def test_near_duplicates_of_each_other_do_not_fill_the_memory():
    """Candidates of all rows at a time are 90 MB here, and 16 GB for 20,000 frames of a camera."""
    signatures = drawn("one", np.random.default_rng(0), 1500)
    tracemalloc.start()
    joined = join_near_duplicates(signatures, np.arange(1500))
    shared = has_near_duplicate(signatures, signatures)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not joined.any()
    assert shared.all()
    assert peak < 20e6
