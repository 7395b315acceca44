"""datatrove's MinHash over characters: signatures of a part, pairs of a bucket, clusters of all.

Written for datatrove 0.10. Its default tokenizer takes a Chinese clause for one word, so the characters are given as
tokens, and its fourth stage, which addresses documents by position and keeps whichever comes first, is not used.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m6.data.corpus.recipe import NearDuplicateSettings
from m6.errors import UserError
from m6.files import sync

_FILES_OF_A_PART = 2  # that are open at once
_OTHER_FILES = 100


def require_datatrove() -> None:
    """Raises UserError if datatrove is not installed, or cannot hash."""
    try:
        import datatrove.pipeline.dedup.minhash  # noqa: F401
        import xxhash
    except ImportError as error:
        raise UserError(f'm6 data corpus needs datatrove ({error}): pip install "m6-recipes[corpus]"') from None
    if int(xxhash.VERSION.split(".")[0]) >= 4:
        raise UserError(f"datatrove cannot hash with xxhash {xxhash.VERSION}: pip install 'xxhash<4'")


def open_many_files(num_parts: int) -> None:
    """Lets this process open as many files as the signatures and clusters of some parts need.

    Raises:
        UserError: it may not.
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
    """Writes the signatures of the documents of a part, one file for each bucket.

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
    """Writes the pairs of documents that agree in one bucket.

    Args:
        signatures: folder of all signatures.
        folder: folder of the pairs of all buckets.
        bucket: number of the bucket.
        num_parts: parts that have signatures.
        settings: as for the signatures.

    Raises:
        UserError: as ``open_many_files``.
    """
    open_many_files(num_parts)
    with _renamed_when_complete(folder, f"bucket-{bucket}") as temporary:
        step = _datatrove().MinhashDedupBuckets(str(signatures), str(temporary), config=_config(settings))
        step.run(rank=bucket, world_size=settings.num_buckets)


def find_clusters(pairs: Path, num_parts: int, settings: NearDuplicateSettings) -> dict[int, NDArray[np.uint32]]:
    """Joins all pairs to clusters.

    Args:
        pairs: folder of the pairs of all buckets.
        num_parts: parts that have signatures.
        settings: as for the pairs.

    Returns:
        For each part with copies: uint32 [documents, 2], the number of the document and that of its cluster.

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
    """Yields a temporary folder whose files get their names in ``folder``: datatrove writes under the final names."""
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

    # The texts are in their compared form already. Numbers become 0: pages that differ in them alone are copies.
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
