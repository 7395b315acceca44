"""What a stage removed: counts by reason, a bounded sample of each, and histograms."""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, ConfigDict

from m6.data.corpus.characters import digest
from m6.data.corpus.quality import chinese_share

SAMPLES = 10  # of each reason
SAMPLE_CHARS = 200
_SHARE_STEPS = 10


class Sample(BaseModel):
    """A removed document.

    Attributes:
        id: its id.
        text: the beginning of its text.
        copy_of: of a copy, the part and the number of the document that is kept.
        kept_id: its id, in the record of a finished corpus.
        kept_text: the beginning of its text, in the record of a finished corpus.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    text: str
    copy_of: tuple[int, int] | None = None
    kept_id: str | None = None
    kept_text: str | None = None


class Histogram(BaseModel):
    """Documents by length and by share of Chinese.

    Attributes:
        lengths: documents of [2^k, 2^(k+1)) characters, by k.
        shares: documents whose share of Chinese characters is in [k/10, (k+1)/10), by k; 1.0 is in the last.
    """

    model_config = ConfigDict(extra="forbid")

    lengths: Counter[int] = Counter()
    shares: Counter[int] = Counter()

    def add(self, text: str) -> None:
        """Counts a document."""
        self.lengths[max(len(text), 1).bit_length() - 1] += 1
        self.shares[min(int(chinese_share(text) * _SHARE_STEPS), _SHARE_STEPS - 1)] += 1


class Tally(BaseModel):
    """What became of the documents of one input.

    Attributes:
        documents: documents that were read, with those that cannot be used.
        characters: characters of the usable ones.
        removed: removed documents by stage and reason.
        removed_characters: their characters by stage.
        changed: replaced personal data by kind, and removed lines.
        kept: documents that were written.
        kept_characters: their characters.
        rows: the passages that they were cut to.
        histograms: of the usable documents ("read") and of those that were written ("kept").
        samples: removed documents, by "stage: reason": those whose id has the least digest, so that any number of tasks
            gives the same ones.
    """

    model_config = ConfigDict(extra="forbid")

    documents: int = 0
    characters: int = 0
    removed: dict[str, Counter[str]] = {}
    removed_characters: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    kept: int = 0
    kept_characters: int = 0
    rows: int = 0
    histograms: dict[str, Histogram] = {}
    samples: dict[str, list[Sample]] = {}

    def remove(self, stage: str, reason: str, identity: str, text: str, copy_of: tuple[int, int] | None = None) -> None:
        """Counts a removed document; ``copy_of`` as in ``Sample``."""
        self.removed.setdefault(stage, Counter())[reason] += 1
        self.removed_characters[stage] += len(text)
        samples = self.samples.setdefault(f"{stage}: {reason}", [])
        samples.append(Sample(id=identity, text=text[:SAMPLE_CHARS], copy_of=copy_of))
        if len(samples) >= 2 * SAMPLES:
            _bound(samples)

    def count(self, name: str, text: str) -> None:
        """Adds a document to the histogram ``name``."""
        self.histograms.setdefault(name, Histogram()).add(text)

    def add(self, other: Tally) -> None:
        """Adds what another task counted."""
        for name in ("documents", "characters", "kept", "kept_characters", "rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for stage, reasons in other.removed.items():
            self.removed.setdefault(stage, Counter()).update(reasons)
        self.removed_characters.update(other.removed_characters)
        self.changed.update(other.changed)
        for name, histogram in other.histograms.items():
            mine = self.histograms.setdefault(name, Histogram())
            mine.lengths.update(histogram.lengths)
            mine.shares.update(histogram.shares)
        for reason, samples in other.samples.items():
            self.samples.setdefault(reason, []).extend(samples)
            _bound(self.samples[reason])

    def removed_total(self) -> int:
        """Documents that were removed at any stage."""
        return sum(sum(reasons.values()) for reasons in self.removed.values())


def _bound(samples: list[Sample]) -> None:
    samples[:] = sorted(samples, key=lambda sample: (digest(sample.id), sample.id))[:SAMPLES]
