"""The micro-batches of validation: equal for all runs on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from m6.data.collate import MicroBatch
from m6.data.objectives import source_kind
from m6.data.order import permuted

if TYPE_CHECKING:
    from m6.data.pretraining import PretrainingData


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
