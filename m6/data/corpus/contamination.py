"""Finds documents that share an n-gram with held-out texts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m6.data.corpus.characters import compared_form, without_marks
from m6.data.corpus.reading import read_set
from m6.data.corpus.recipe import NamedSet
from m6.data.corpus.tally import Tally
from m6.errors import UserError
from m6.files import atomic_path

_CHUNK = 1 << 22  # numbers that are collected before equal ones are joined
_HEADER_BYTES = 128  # of a .npy file


def ngram_hashes(text: str, ngram_chars: int) -> NDArray[np.uint64]:
    """Returns a hash of each n-gram of the letters and digits of a text: uint64 [characters - n + 1], or empty.

    A hash is the sum, modulo 2^64, of mixed code points times a random odd weight for each place. Two n-grams are equal
    in it with a chance of about 2^-63.
    """
    letters = without_marks(compared_form(text))
    codes = np.frombuffer(letters.encode("utf-32-le"), dtype="<u4").astype(np.uint64)
    if len(codes) < ngram_chars:
        return np.empty(0, dtype=np.uint64)
    mixed = _mixed(codes)
    total = np.zeros(len(codes) - ngram_chars + 1, dtype=np.uint64)
    for place, weight in enumerate(_weights(ngram_chars)):
        total += mixed[place : place + len(total)] * weight
    return total


def hashes_of_set(named: NamedSet, ngram_chars: int, tally: Tally) -> Iterator[NDArray[np.uint64]]:
    """Yields the hashes of each text of a named set that has some, and counts all texts.

    Raises:
        UserError: no text has an n-gram, so that the set would protect nothing.
    """
    for row in read_set(named):
        tally.documents += 1
        tally.characters += len(row.text)
        hashes = ngram_hashes(row.text, ngram_chars)
        if len(hashes):
            tally.kept += 1
            tally.kept_characters += len(row.text)
            yield hashes
        else:
            problem = row.problem or f"fewer than {ngram_chars} letters and digits"
            tally.remove("held_out", problem, row.id, row.text)
    if not tally.kept:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in tally.removed.get("held_out", {}).items())
        raise UserError(
            f'decontamination.sets: "{named.name}" would protect nothing: no text in column "{named.text_column}" of '
            f"{named.path} has {ngram_chars} letters and digits ({reasons or 'it is empty'})"
        )


@functools.cache
def _weights(count: int) -> NDArray[np.uint64]:
    return np.random.Generator(np.random.PCG64(0)).integers(0, 2**63, count, dtype=np.uint64) * 2 + 1


def _mixed(codes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Code points are small numbers, which differ in few bits: this spreads them (the finalizer of SplitMix64)."""
    mixed = (codes + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def write_index(file: Path, hashes: Iterable[NDArray[np.uint64]]) -> None:
    """Writes the different hashes in order, atomically. Memory: 8 bytes for each different one, twice while sorting."""
    joined = np.empty(0, dtype=np.uint64)
    waiting: list[NDArray[np.uint64]] = []
    count = 0
    for each in hashes:
        waiting.append(each)
        count += len(each)
        if count >= max(_CHUNK, len(joined)):
            joined, waiting, count = np.unique(np.concatenate([joined, *waiting])), [], 0
    joined = np.unique(np.concatenate([joined, *waiting]))
    with atomic_path(file) as temporary, temporary.open("wb") as opened:
        np.save(opened, joined)


def read_index(file: Path) -> NDArray[np.uint64]:
    """Returns the hashes of an index in order; they stay in the file until they are looked at."""
    is_empty = file.stat().st_size <= _HEADER_BYTES  # nothing to map
    index: NDArray[np.uint64] = np.load(file, mmap_mode=None if is_empty else "r")
    return index


def shares_ngram(hashes: NDArray[np.uint64], index: NDArray[np.uint64]) -> bool:
    """Whether any of the hashes is in the index."""
    if not len(index) or not len(hashes):
        return False
    places = np.minimum(np.searchsorted(index, hashes), len(index) - 1)
    return bool((index[places] == hashes).any())
