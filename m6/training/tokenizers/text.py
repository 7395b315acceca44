"""Trains the SentencePiece model of the text tokenizer on a data folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentencepiece

from m6.errors import UserError
from m6.files import atomic_path, write_json
from m6.lock import FolderLock

if TYPE_CHECKING:
    from m6.data.manifest import Manifest
from m6.tokenizers.text import (
    MAX_PIECE_CHARACTERS,
    MODEL_FILE,
    M6Tokenizer,
    load_text_tokenizer,
    normalize_text,
    split_sentences,
)

TRAINING_FILE = "tokenizer_training.json"
# SentencePiece drops lines of more than 4192 bytes, and a character has at most 4 bytes.
MAX_LINE_CHARACTERS = 1000


def train_text_tokenizer(
    manifest: Manifest,
    out_dir: str | Path,
    vocab_size: int,
    *,
    image_vocab_size: int = 8192,
    character_coverage: float = 0.9998,
    max_piece_length: int = MAX_PIECE_CHARACTERS,
    sample_bytes: int = 256 << 20,
    overwrite: bool = False,
) -> M6Tokenizer:
    """Trains a unigram model on the train split of every source and saves the tokenizer, each file atomically.

    The same data and settings give the same bytes. Digits are split, and a space starts a piece. A character outside
    of the vocabulary is encoded as bytes, so there are no unknown tokens.

    Args:
        manifest: the data folder; the training reads texts, questions and answers of a random sample of rows.
        out_dir: output folder of the tokenizer and of ``tokenizer_training.json``, the record of its training.
        vocab_size: number of text pieces, including 256 byte pieces.
        image_vocab_size: number of image codes; it only sets the size of the joint vocabulary.
        character_coverage: share of the sample's characters with their own pieces.
        max_piece_length: characters of the longest piece. Short pieces can form new captions: a whole caption as one
            piece would carry no information about its words.
        sample_bytes: size of the sample in bytes of UTF-8.
        overwrite: replace a tokenizer in ``out_dir``. Runs with the old tokenizer can then not be continued.

    Raises:
        UserError: ``out_dir`` holds a tokenizer, the train split has no text, or the text does not suit the
            vocabulary size.
    """
    out_dir = Path(out_dir)
    if (out_dir / MODEL_FILE).exists() and not overwrite:
        raise UserError(
            f"{out_dir} holds a tokenizer, which runs may need; choose another folder, or replace it with --overwrite"
        )
    options: dict[str, Any] = {
        "model_type": "unigram",
        "vocab_size": vocab_size,
        "character_coverage": character_coverage,
        "byte_fallback": True,
        "split_digits": True,
        "split_by_whitespace": True,
        "split_by_unicode_script": True,
        "max_sentencepiece_length": max_piece_length,
        "normalization_rule_name": "identity",  # normalize_text does it
        "add_dummy_prefix": False,  # Chinese has no spaces: a prefix would only add a piece to every text
        "unk_id": 0,
        "bos_id": -1,
        "eos_id": -1,
        "pad_id": -1,
        "num_threads": 4,  # fixed: the order of sums over threads changes the last digits of the scores
    }
    buffer = io.BytesIO()
    lines = list(_training_lines(manifest, sample_bytes))
    if not lines:
        raise UserError(f"{manifest.folder}: the train split holds no text to train a tokenizer on")
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=buffer, minloglevel=2, **options
        )
    except RuntimeError as error:
        raise UserError(f"vocab_size {vocab_size} does not suit the text: {_explain(str(error))}") from None
    settings = options | {"image_vocab_size": image_vocab_size, "sample_bytes": sample_bytes}
    sample = {"lines": len(lines), "characters": sum(map(len, lines)), "sources": sorted(manifest.sources)}
    # save_pretrained does not write atomically: it writes elsewhere, and each finished file is moved into place.
    with tempfile.TemporaryDirectory() as folder:
        model_file, saved = Path(folder, MODEL_FILE), Path(folder, "saved")
        model_file.write_bytes(buffer.getvalue())
        tokenizer = M6Tokenizer(str(model_file), image_vocab_size=image_vocab_size)
        tokenizer.save_pretrained(str(saved))
        write_json(
            saved / TRAINING_FILE,
            {
                "settings": settings,
                "sample": sample,
                "sentencepiece": sentencepiece.__version__,
                "sha256": {MODEL_FILE: hashlib.sha256(buffer.getvalue()).hexdigest()},
                "fingerprint": tokenizer.fingerprint,
            },
        )
        # All files are copied before any file gets its name, so a full disk leaves the old tokenizer. Then the old
        # model is removed first, and the new model, with the outermost context, is renamed last. Without a model the
        # folder holds no tokenizer; a mixture of two tokenizers would be a tokenizer with a wrong vocabulary.
        with FolderLock(out_dir / "lock", out_dir), contextlib.ExitStack() as written:
            for file in sorted(saved.iterdir(), key=lambda file: file.name != MODEL_FILE):
                shutil.copyfile(file, written.enter_context(atomic_path(out_dir / file.name)))
            (out_dir / MODEL_FILE).unlink(missing_ok=True)
    return load_text_tokenizer(out_dir)


def _training_lines(manifest: Manifest, sample_bytes: int) -> Iterator[str]:
    """Yields sentences of all sources in a fixed random order, until the sample is full."""
    from m6.data.order import RowOrder
    from m6.data.reader import open_sources

    rows = open_sources(manifest, sorted(manifest.sources), "train", ["text", "question", "answer", "context"])
    order = RowOrder(rows.block_sizes, lambda epoch: epoch)
    for position in range(len(rows)):
        for text in filter(None, rows[order.row(position)].values()):
            for sentence in split_sentences(normalize_text(text)):
                # Without line breaks: the tokenizer always encodes them as bytes.
                line = sentence.strip()
                yield from (line[i : i + MAX_LINE_CHARACTERS] for i in range(0, len(line), MAX_LINE_CHARACTERS))
                sample_bytes -= len(line.encode())
        if sample_bytes <= 0:
            return


def _explain(message: str) -> str:
    """Translates SentencePiece's errors about the vocabulary size, because they refer to its C++ code."""
    for pattern, text in (
        (r"<= (\d+)", "it suffices for at most {} pieces"),
        (r"required_chars\. \d+ vs (\d+)", "its characters and the bytes need at least {} pieces"),
    ):
        if match := re.search(pattern, message):
            return text.format(match.group(1))
    return message
