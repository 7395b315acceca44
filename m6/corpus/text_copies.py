"""Similar texts: datatrove's MinHash over characters, and n-grams shared with held-out texts.

MinHash runs in three stages: signatures of a part, pairs of a bucket, clusters of all. The code is written for
datatrove 0.10. datatrove's default tokenizer treats a Chinese clause as one word, so characters are the tokens here.
Its fourth stage is not used: it addresses documents by position and keeps the first copy.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import resource
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m6.corpus.counters import Counters
from m6.corpus.reading import read_set
from m6.corpus.recipe import NamedSet, NearDuplicateSettings
from m6.corpus.rules import compared_form, without_marks
from m6.errors import UserError
from m6.files import atomic_path, sync

_FILES_OF_A_PART = 2  # open at the same time
_OTHER_FILES = 100


def require_datatrove() -> None:
    """Raises UserError if datatrove is not installed or its xxhash is too new."""
    try:
        import datatrove.pipeline.dedup.minhash  # noqa: F401
        import xxhash
    except ImportError as error:
        raise UserError(f'm6 data corpus needs datatrove ({error}): pip install "m6-recipes[corpus]"') from None
    if int(xxhash.VERSION.split(".")[0]) >= 4:
        raise UserError(f"datatrove cannot hash with xxhash {xxhash.VERSION}: pip install 'xxhash<4'")


def open_many_files(num_parts: int) -> None:
    """Raises this process's limit of open files to the most allowed, for signatures and clusters of these parts.

    Raises:
        UserError: the hard limit is too low.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_parts * _FILES_OF_A_PART + _OTHER_FILES
    if most != resource.RLIM_INFINITY and most < needed:
        raise UserError(
            f"a process may open {most:,} files (ulimit -Hn), and copies among {num_parts:,} parts with texts are "
            f"found with {needed:,}; raise the limit, or join input files to fewer"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def write_signatures(texts: Iterable[str], folder: Path, part: int, settings: NearDuplicateSettings) -> None:
    """Writes the signatures of the documents of a part: one file for each bucket.

    Args:
        texts: letters and digits of each document in its compared form. The n-th text is document n.
        folder: folder of all signatures.
        part: number of the part.
        settings: n-grams, buckets and hashes.
    """
    from datatrove.data import Document
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Characters(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return list(text)

        def sent_tokenize(self, text: str) -> list[str]:
            return [text]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    with _renamed_when_complete(folder, f"part-{part}") as temporary:
        step = _datatrove().MinhashDedupSignature(str(temporary), config=_config(settings), language=Characters())
        step.run((Document(text=text, id="") for text in texts), rank=part)


def write_pairs(signatures: Path, folder: Path, bucket: int, num_parts: int, settings: NearDuplicateSettings) -> None:
    """Writes the pairs of documents with equal signatures in one bucket.

    Args:
        signatures: folder of all signatures.
        folder: folder of the pairs of all buckets.
        bucket: number of the bucket.
        num_parts: number of parts with texts.
        settings: as for the signatures.

    Raises:
        UserError: as ``open_many_files``.
    """
    open_many_files(num_parts)
    with _renamed_when_complete(folder, f"bucket-{bucket}") as temporary:
        step = _datatrove().MinhashDedupBuckets(str(signatures), str(temporary), config=_config(settings))
        step.run(rank=bucket, world_size=settings.num_buckets)


def find_clusters(pairs: Path, num_parts: int, settings: NearDuplicateSettings) -> dict[int, NDArray[np.uint32]]:
    """Joins all pairs into clusters.

    Args:
        pairs: folder of the pairs of all buckets.
        num_parts: number of parts with texts.
        settings: as for the pairs.

    Returns:
        For each part with copies: document number and cluster number, uint32 [documents, 2].

    Raises:
        UserError: as ``open_many_files``.
    """
    open_many_files(num_parts)
    with tempfile.TemporaryDirectory(prefix="clusters-", dir=pairs.parent) as folder:
        step = _datatrove().MinhashDedupCluster(str(pairs), folder, config=_config(settings), save_cluster_id=True)
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
            step.run()
        return {
            int(file.stem): np.fromfile(file, dtype="<u4").reshape(-1, 2) for file in Path(folder).glob("*.clusters")
        }


@contextlib.contextmanager
def _renamed_when_complete(folder: Path, name: str) -> Iterator[Path]:
    """Yields a temporary folder and then moves its files to ``folder``, since datatrove does not write atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder.parent) as temporary:
        yield Path(temporary)
        for file in sorted(path for path in Path(temporary).rglob("*") if path.is_file()):
            target = folder / file.relative_to(temporary)
            target.parent.mkdir(exist_ok=True)
            sync(file)
            os.replace(file, target)
            sync(target.parent)


def _config(settings: NearDuplicateSettings) -> Any:
    from datatrove.utils.text import TextNormConfig

    # The texts are in their compared form already. Numbers become 0, so pages with only different numbers are copies.
    only_numbers = TextNormConfig(
        lowercase=False, norm_whitespace=False, remove_punctuation=False, norm_unicode_diacritics=False
    )
    return _datatrove().MinhashConfig(
        norm_config=only_numbers,
        n_grams=settings.ngram_chars,
        num_buckets=settings.num_buckets,
        hashes_per_bucket=settings.hashes_per_bucket,
    )


def _datatrove() -> Any:
    from datatrove.pipeline.dedup import minhash
    from loguru import logger

    logger.disable("datatrove")  # it describes every step on stderr
    return minhash


_CHUNK = 1 << 22  # hashes collected before duplicates are removed
_HEADER_BYTES = 128  # of a .npy file


def ngram_hashes(text: str, ngram_chars: int) -> NDArray[np.uint64]:
    """Returns a hash of each n-gram of the letters and digits of a text: uint64 [characters - n + 1], or empty.

    A hash is a sum modulo 2^64: each mixed code point times the random odd weight of its position. The chance of a
    collision of two n-grams is about 2^-63.
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


def hashes_of_set(named: NamedSet, ngram_chars: int, counters: Counters) -> Iterator[NDArray[np.uint64]]:
    """Yields the hashes of each text of a named set, and counts texts. A text without an n-gram is counted as removed.

    Raises:
        UserError: no text has an n-gram, so the set would protect nothing.
    """
    for row in read_set(named):
        counters.documents += 1
        counters.characters += len(row.text)
        hashes = ngram_hashes(row.text, ngram_chars)
        if len(hashes):
            counters.kept += 1
            counters.kept_characters += len(row.text)
            yield hashes
        else:
            problem = row.problem or f"fewer than {ngram_chars} letters and digits"
            counters.remove("held_out", problem, row.id, row.text)
    if not counters.kept:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in counters.removed.get("held_out", {}).items())
        raise UserError(
            f'decontamination.sets: "{named.name}" would protect nothing: no text in column "{named.text_column}" of '
            f"{named.path} has {ngram_chars} letters and digits ({reasons or 'it is empty'})"
        )


@functools.cache
def _weights(count: int) -> NDArray[np.uint64]:
    return np.random.Generator(np.random.PCG64(0)).integers(0, 2**63, count, dtype=np.uint64) * 2 + 1


def _mixed(codes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spreads code points over 64 bits (the finalizer of SplitMix64): small numbers differ in few bits."""
    mixed = (codes + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def write_index(file: Path, hashes: Iterable[NDArray[np.uint64]]) -> None:
    """Writes the unique hashes, sorted, atomically. Memory: 8 bytes for each unique hash, twice that while sorting."""
    joined = np.empty(0, dtype=np.uint64)
    waiting: list[NDArray[np.uint64]] = []
    count = 0
    for each in hashes:
        waiting.append(each)
        count += len(each)
        # A merge sorts all joined hashes again. Waiting for as many new ones keeps the total cost low.
        if count >= max(_CHUNK, len(joined)):
            joined, waiting, count = np.unique(np.concatenate([joined, *waiting])), [], 0
    joined = np.unique(np.concatenate([joined, *waiting]))
    with atomic_path(file) as temporary, temporary.open("wb") as opened:
        np.save(opened, joined)


def read_index(file: Path) -> NDArray[np.uint64]:
    """Returns the sorted hashes of an index, memory-mapped."""
    is_empty = file.stat().st_size <= _HEADER_BYTES  # an empty file cannot be mapped
    index: NDArray[np.uint64] = np.load(file, mmap_mode=None if is_empty else "r")
    return index


def shares_ngram(hashes: NDArray[np.uint64], index: NDArray[np.uint64]) -> bool:
    """Whether any of the hashes is in the index."""
    if not len(index) or not len(hashes):
        return False
    places = np.minimum(np.searchsorted(index, hashes), len(index) - 1)
    return bool((index[places] == hashes).any())
