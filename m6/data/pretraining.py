"""Micro-batches of the training mixture. Each is a pure function of its global index.

Validation micro-batches are equal in all runs on the same data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from m6.data.captions import SeenCaptions, describe_captions
from m6.data.codes import Codes, CodesManifest, load_codes_manifest
from m6.data.collate import Collator, MicroBatch
from m6.data.manifest import SPLITS, Manifest
from m6.data.objectives import (
    MIN_TEXT_TOKENS,
    OBJECTIVES,
    BadRow,
    Example,
    ObjectivesSettings,
    Sample,
    is_paired,
    make_example,
    max_text_tokens,
    pair,
    reads_codes,
    source_kind,
    target_ids,
    text_to_read,
)
from m6.data.order import Mixture, permuted
from m6.data.reader import BlockCache, Rows, open_split
from m6.data.settings import DataSettings
from m6.data.verification import check_sizes
from m6.data.weights import cap_epochs, pair_weights, source_weights
from m6.data.workers import prepared
from m6.errors import UserError
from m6.tokenizers.pictures import decode_picture
from m6.tokenizers.text import load_text_tokenizer


class ValidationBatches(Sequence[MicroBatch]):
    """The micro-batches of ``PretrainingData.validation_micro_batches``."""

    def __init__(self, data: PretrainingData, objective: str, num_rows: int, split: str) -> None:
        self._data, self._objective, self._split = data, objective, split
        manifest = data.manifest
        eligible = [s for s in data.source_weights if manifest.sources[s].kind == source_kind(objective)]
        self._sizes = {source: manifest.split(source, split).rows for source in eligible}
        self._total = sum(self._sizes.values())
        self._read = min(num_rows, self._total)
        self._length = -(-self._read // data.micro_batch_size)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> MicroBatch:  # type: ignore[override]  # no slices
        if not 0 <= index < self._length:
            raise IndexError(index)
        data, size = self._data, self._data.micro_batch_size
        bad_rows: list[str] = []
        read = []
        for position in range(index * size, min((index + 1) * size, self._read)):
            # A fixed key instead of the run's seed: validation losses are comparable between runs.
            source, row = self._locate(permuted(position, self._total, key=0))
            read.append(data.read_row(self._objective, source, self._split, row, position, bad_rows))
        samples = [sample for sample in read if sample is not None]
        return data.collator([e for e, _ in samples], [p for _, p in samples], bad_rows)

    def _locate(self, row: int) -> tuple[str, int]:
        for source, size in self._sizes.items():
            if row < size:
                return source, row
            row -= size
        raise AssertionError("a row beyond the split")


# A bad row is replaced by the next row of its source. The run fails after this many consecutive bad rows.
MAX_ATTEMPTS = 100
# Least denominator of the share of bad rows, so a single early bad row does not end a run.
MIN_SAMPLES_FOR_SHARE = 1000
_COLUMNS = ("id", "text", "image", "question", "answer", "context")


class PretrainingData:
    """The pretraining data of one split.

    ``micro_batch(index)`` depends only on the settings, the seed and the index. So the data do not depend on the
    numbers of ranks and workers, and a resumed run needs only the next index. The object can be pickled: each process
    opens the data files itself.

    Args:
        settings: data folder, tokenizers and sources.
        objectives: the objectives and their shares.
        split: the split read by ``micro_batch``.
        seed: seed of the run.
        micro_batch_size: samples of a micro-batch.
        samples_per_step: samples of a step, over all ranks.
        total_samples: samples of the run, for ``max_epochs``.
        image_size: side of an image in pixels.
        patch_size: side of a patch in pixels; an image takes ``(image_size / patch_size)^2`` tokens.

    Raises:
        UserError: a folder is missing, a source is unknown, an objective has no source, all weights are 0, or
            sequence_length leaves no room for text.
    """

    def __init__(
        self,
        settings: DataSettings,
        objectives: ObjectivesSettings,
        *,
        split: str = "train",
        seed: int,
        micro_batch_size: int,
        samples_per_step: int = 1,
        total_samples: int = 1,
        image_size: int,
        patch_size: int,
    ) -> None:
        self.settings, self.objectives, self.split = settings, objectives, split
        self.micro_batch_size = micro_batch_size
        self.manifest = Manifest.load(settings.path)
        self.tokenizer = load_text_tokenizer(settings.tokenizer)
        num_patches = (image_size // patch_size) ** 2
        self.collator = Collator(
            tokenizer=self.tokenizer,
            sequence_length=settings.sequence_length,
            num_patches=num_patches,
            image_size=image_size,
            packing=settings.packing,
        )
        self.source_weights = source_weights(self.manifest, split, settings.sources, settings.temperature)
        if settings.max_epochs is not None and split == "train":
            self.source_weights = cap_epochs(
                self.manifest,
                split,
                objectives,
                self.source_weights,
                total_samples,
                settings.max_epochs,
            )
        self._open_codes: dict[tuple[str, str], Codes] = {}
        self.codes = self._find_codes()
        num_codes = 0 if self.codes is None else self.codes.num_codes
        self._max_tokens = {
            name: max_text_tokens(name, settings.sequence_length, num_patches, num_codes) for name in OBJECTIVES
        }
        self._sizes = {source: self.manifest.split(source, split).rows for source in self.source_weights}
        blocks = {
            source: Rows(self.manifest.folder, self.manifest.split(source, split).shards, _COLUMNS).block_sizes
            for source in self.source_weights
        }
        pairs = pair_weights(self.manifest, objectives, self.source_weights)
        self._mixture = Mixture(pairs, blocks, seed, samples_per_step)
        if settings.max_epochs is not None and split == "train":
            self._check_epochs(settings.max_epochs, total_samples)
        self._open: dict[tuple[str, str], Rows] = {}
        self._cache = BlockCache()
        for name in self.active_objectives:
            if self._max_tokens[name] < MIN_TEXT_TOKENS:
                raise UserError(
                    f"m6.data.sequence_length {settings.sequence_length} leaves {self._max_tokens[name]} tokens "
                    f"of text for {name} (a picture takes {num_codes if reads_codes(name) else num_patches}); at least "
                    f"{MIN_TEXT_TOKENS} are needed"
                )

    @property
    def sources(self) -> list[str]:
        """The sources with positive weight."""
        return list(self.source_weights)

    @property
    def active_objectives(self) -> list[str]:
        """The objectives with positive weight, in the order of OBJECTIVES."""
        return [name for name in OBJECTIVES if self.objectives.of(name).weight > 0]

    @property
    def tokenizer_identities(self) -> dict[str, str | None]:
        """Checksums of the text tokenizer and the image tokenizer, by their key in ``m6.data``.

        The checksum of the image tokenizer is None if no objective reads image codes.
        """
        codes = None if self.codes is None else self.codes.tokenizer
        return {"tokenizer": self.tokenizer.fingerprint, "image_tokenizer": codes}

    def realised_mixture(self, num_samples: int) -> dict[str, tuple[float, float]]:
        """Returns for each source its share of the samples, and its number of epochs in ``num_samples`` samples."""
        size = self._mixture.block_size
        shares = {source: rows / size for source, rows in self._mixture.rows_per_block.items()}
        return {source: (share, share * num_samples / self._sizes[source]) for source, share in shares.items()}

    def _check_epochs(self, max_epochs: float, num_samples: int) -> None:
        """Raises UserError if a source is so small that even the least possible share exceeds ``max_epochs``."""
        for source, (share, times) in self.realised_mixture(num_samples).items():
            if times > 2 * max_epochs:  # smaller excess comes from rounding to whole samples of a block
                raise UserError(
                    f'm6.data.max_epochs {max_epochs:g}: the {self._sizes[source]:,} rows of "{source}" would be read '
                    f"{times:.0f} times, since each source has at least {share:g} of the samples; leave it out of "
                    "m6.data.sources"
                )

    def check_files(self) -> None:
        """Checks existence and size of all shards. This takes seconds even for tens of thousands of shards.

        Raises:
            UserError: a shard is missing or has another size.
        """
        for source in self.sources:
            for split in (self.split, "validation"):
                check_sizes(self.manifest.folder, self.manifest.split(source, split).shards)

    def target_ids(self, objective: str, source: str, split: str) -> Iterator[list[int]]:
        """Yields the target ids of each row of a source, cut as in ``micro_batch``. Bad rows are left out."""
        if not self.manifest.files(source, split):
            return
        rows = open_split(self.manifest, source, split, [name for name in _COLUMNS if name != "image"], self._cache)
        for row, values in enumerate(rows):
            sample = Sample(**values, codes=self._codes_of(objective, source, split, row))
            if is_paired(objective):
                rng = np.random.default_rng(row)
                sample = pair(sample, rows[rows.near(row, rng)]["text"], rng)
            try:
                yield target_ids(objective, sample, self.tokenizer, self._max_tokens[objective])
            except BadRow:
                continue

    def text_lengths(self, objective: str, source: str, num_rows: int) -> tuple[list[int], int]:
        """Returns the numbers of tokens of a source's first training texts before the cut, and the limit of the cut."""
        names = [name for name in _COLUMNS if name != "image"]
        # Checksums of whole shards are not verified here: the training verifies them when it reads them.
        rows = Rows(self.manifest.folder, self.manifest.split(source, "train").shards, names, self._cache)
        texts = (text_to_read(objective, Sample(**values)) for values in itertools.islice(rows, num_rows))
        return [len(self.tokenizer.encode_ids(text)) for text in texts], self._max_tokens[objective]

    def seen_captions(self, max_rows: int) -> SeenCaptions | None:
        """Describes the training captions of text-to-image objectives; None without any, or with over ``max_rows``."""
        objective = next((name for name in self.active_objectives if reads_codes(name)), None)
        if objective is None:
            return None
        splits = {
            name: self.manifest.split(name, "train")
            for name in self.sources
            if self.manifest.sources[name].kind == source_kind(objective)
        }
        if sum(split.rows for split in splits.values()) > max_rows:
            return None
        texts = {
            name: Rows(self.manifest.folder, split.shards, ["text"], self._cache).column("text")
            for name, split in splits.items()
        }
        return describe_captions(self.tokenizer, texts, self._max_tokens[objective])

    def micro_batch(self, index: int) -> MicroBatch:
        """Returns the micro-batch with a global index, counted from 0.

        A bad row is replaced by the next row of its source and listed in ``bad_rows``.

        Raises:
            UserError: no usable row was found in a source, or a shard is damaged.
            StorageError: a shard cannot be read.
        """
        numbers = range(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)
        bad_rows: list[str] = []
        samples = [self._sample(number, bad_rows) for number in numbers]
        return self.collator([e for e, _ in samples], [p for _, p in samples], bad_rows)

    def read_row(
        self, objective: str, source: str, split: str, row: int, seed: int, bad_rows: list[str]
    ) -> tuple[Example, np.ndarray | None] | None:
        """Returns a row's example and its decoded image. For a bad row, appends to ``bad_rows`` and returns None.

        Args:
            objective, source, split, row: the objective, and the row to read.
            seed: seed of the objective's random choices.
            bad_rows: list of bad rows and their reasons, to append to.
        """
        sample = self._sample_of(objective, source, split, row)
        rng = np.random.default_rng(seed)
        if is_paired(objective):
            rows = self._open[source, split]
            sample = pair(sample, rows[rows.near(row, rng)]["text"], rng)
        try:
            example = make_example(objective, sample, rng, self.tokenizer, self.objectives, self._max_tokens[objective])
            example = replace(example, data_source_id=self.sources.index(source))
            if example.image is None:
                return example, None
            return example, self._decode(example.image)
        except BadRow as error:
            bad_rows.append(f"{source}:{sample.id}: {error}")
            return None

    def loader(self, indices: Iterable[int], num_workers: int) -> Iterator[MicroBatch]:
        """Yields the micro-batches of ``indices`` in order. Worker processes prepare them ahead of time.

        Raises:
            UserError: more than ``max_bad_row_share`` of the rows are bad; or as in ``micro_batch``.
            StorageError, RetryableError: as in ``micro_batch``, or in ``prepared``.
        """
        batches: Iterator[MicroBatch] = prepared(
            _MicroBatches(self), indices, "m6.data.num_workers", num_workers, torch.cuda.is_available()
        )
        num_bad = num_samples = 0
        for batch in batches:
            num_bad += len(batch.bad_rows)
            num_samples += batch.num_samples
            if num_bad > self.settings.max_bad_row_share * max(num_samples, MIN_SAMPLES_FOR_SHARE):
                raise UserError(
                    f"{num_bad} bad rows in {num_samples} samples exceed m6.data.max_bad_row_share "
                    f"{self.settings.max_bad_row_share}; the last: {', '.join(batch.bad_rows[-3:])}"
                )
            yield batch

    def validation_micro_batches(
        self, objective: str, num_rows: int, split: str = "validation"
    ) -> Sequence[MicroBatch]:
        """Returns lazy micro-batches of up to ``num_rows`` rows of a held-out split, for one objective.

        They are equal for all seeds: each row is read once, in a fixed random order and with fixed corruption. The
        chosen rows do not depend on the micro-batch size. The last micro-batch may be smaller. Bad rows are left out.
        The sequence is empty if no source of the objective has rows in the split.
        """
        self.objectives.of(objective)
        return ValidationBatches(self, objective, num_rows, split)

    def _find_codes(self) -> CodesManifest | None:
        if not any(reads_codes(name) for name in self.active_objectives):
            return None
        from m6.tokenizers.image import load_image_tokenizer

        if self.settings.image_tokenizer is None:
            raise UserError("m6.data.image_tokenizer is missing: drawing is learned on its codes")
        name = self.settings.image_tokenizer
        codes = load_codes_manifest(self.manifest, load_image_tokenizer(name).checksum, name)
        for source in self.source_weights:
            if self.manifest.sources[source].kind == "image_text":
                for split in SPLITS:  # all splits now, so that a damaged shard does not stop the run later
                    self._open_codes[source, split] = Codes(self.manifest, source, split, codes.tokenizer, name)
        return codes

    def __getstate__(self) -> dict[str, Any]:
        # Open data sets are not sent to workers: each worker opens the files itself.
        return self.__dict__ | {"_open": {}, "_open_codes": {}, "_cache": BlockCache()}

    def _sample(self, number: int, bad_rows: list[str]) -> tuple[Example, np.ndarray | None]:
        draw = self._mixture.draw(number)
        for attempt in range(min(MAX_ATTEMPTS, self._sizes[draw.source])):
            row = self._mixture.row(draw, attempt)
            example = self.read_row(draw.objective, draw.source, self.split, row, draw.seed, bad_rows)
            if example is not None:
                return example
        raise UserError(
            f'{self.settings.path}: source "{draw.source}" has no usable row; the last: {", ".join(bad_rows[-3:])}'
        )

    def _sample_of(self, objective: str, source: str, split: str, row: int) -> Sample:
        if (source, split) not in self._open:
            self._open[source, split] = open_split(self.manifest, source, split, _COLUMNS, self._cache)
        return Sample(**self._open[source, split][row], codes=self._codes_of(objective, source, split, row))

    def _codes_of(self, objective: str, source: str, split: str, row: int) -> list[int] | None:
        if self.codes is None or not reads_codes(objective):
            return None
        if (source, split) not in self._open_codes:
            self._open_codes[source, split] = Codes(self.manifest, source, split, self.codes.tokenizer)
        codes = self._open_codes[source, split][row]
        return None if codes is None else codes.tolist()

    def _decode(self, image: bytes) -> np.ndarray:
        try:
            return decode_picture(image, self.collator.image_size)
        except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error and more for damaged bytes
            # Only the type: some messages contain a memory address, and would differ between ranks.
            raise BadRow(f"damaged image ({type(error).__name__})") from None


class _MicroBatches(Dataset[MicroBatch | UserError]):
    """Micro-batches by index. If a UserError ends the preparation, the error is returned instead."""

    def __init__(self, data: PretrainingData) -> None:
        self._data = data

    def __getitem__(self, index: int) -> MicroBatch | UserError:
        try:
            return self._data.micro_batch(index)
        except UserError as error:
            return error
