"""Counters of a stage: removals by reason with a bounded sample of each, and histograms."""

from __future__ import annotations

import base64
import io
from collections import Counter

from PIL import Image
from pydantic import BaseModel, ConfigDict

from m6.corpus.rules import chinese_share, digest
from m6.data.sources.base import count_unread
from m6.data.sources.pictures import on_white

SAMPLES = 10  # of each reason
PICTURES = 20  # of each reason, if the samples have images
SAMPLE_CHARS = 200
KEPT = "kept"  # name of the samples of kept images, and of the histogram of kept documents
_PICTURE_SIDE = 96  # pixels; about 3 kB in the record
_SHARE_STEPS = 10


class Sample(BaseModel):
    """A removed document, or a kept image.

    Attributes:
        id: its id.
        text: the beginning of its text.
        picture: a small JPEG file of its image in base64.
        copy_of: for a copy, part and number of the kept document.
        kept_id: id of the kept document, in the record of a finished corpus.
        kept_text: the beginning of the kept document's text, likewise.
        kept_picture: the kept document's image, likewise.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    text: str
    picture: str | None = None
    copy_of: tuple[int, int] | None = None
    kept_id: str | None = None
    kept_text: str | None = None
    kept_picture: str | None = None


class Histogram(BaseModel):
    """Numbers of documents by length, by share of Chinese characters, and by side of the image.

    Attributes:
        lengths: documents of [2^k, 2^(k+1)) characters, by k.
        shares: documents with a share of Chinese characters in [k/10, (k+1)/10), by k; 1.0 is in the last bin.
        sides: documents by shorter side of the image, [2^k, 2^(k+1)) pixels, by k.
    """

    model_config = ConfigDict(extra="forbid")

    lengths: Counter[int] = Counter()
    shares: Counter[int] = Counter()
    sides: Counter[int] = Counter()

    def add(self, text: str, side: int | None) -> None:
        """Counts a document; ``side`` is the shorter side of its image in pixels."""
        self.lengths[max(len(text), 1).bit_length() - 1] += 1
        self.shares[min(int(chinese_share(text) * _SHARE_STEPS), _SHARE_STEPS - 1)] += 1
        if side is not None:
            self.sides[side.bit_length() - 1] += 1


class Counters(BaseModel):
    """Counts of the documents of one input.

    Attributes:
        documents: all documents, unusable ones included.
        characters: characters of the usable documents.
        removed: removed documents by stage and reason.
        removed_characters: characters of removed documents by stage.
        changed: replaced personal data by kind, and removed lines.
        unread: ignored files and columns of the documents by name, such as ".seg.png" members of tars.
        kept: written documents.
        kept_characters: characters of the written documents.
        rows: written rows: a document is cut into passages.
        histograms: of the usable documents ("read") and of the written ones ("kept").
        samples: removed documents by "stage: reason", and kept images under "kept". The ids with the smallest digests
            are chosen, independent of the number of tasks.
    """

    model_config = ConfigDict(extra="forbid")

    documents: int = 0
    characters: int = 0
    removed: dict[str, Counter[str]] = {}
    removed_characters: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    kept: int = 0
    kept_characters: int = 0
    rows: int = 0
    histograms: dict[str, Histogram] = {}
    samples: dict[str, list[Sample]] = {}

    def remove(
        self,
        stage: str,
        reason: str,
        identity: str,
        text: str,
        picture: Image.Image | bytes | None = None,
        copy_of: tuple[int, int] | None = None,
    ) -> None:
        """Counts a removed document; ``copy_of`` as in ``Sample``."""
        self.removed.setdefault(stage, Counter())[reason] += 1
        self.removed_characters[stage] += len(text)
        self.sample(f"{stage}: {reason}", identity, text, picture, copy_of)

    def sample(
        self,
        name: str,
        identity: str,
        text: str,
        picture: Image.Image | bytes | None = None,
        copy_of: tuple[int, int] | None = None,
    ) -> None:
        """Offers a document to the samples ``name``: the smallest digests of ids stay."""
        samples = self.samples.setdefault(name, [])
        if len(samples) >= _limit(picture) and _rank(identity) > _rank(samples[-1].id):
            return
        small = None if picture is None else small_picture(picture)
        samples.append(Sample(id=identity, text=text[:SAMPLE_CHARS], picture=small, copy_of=copy_of))
        _bound(samples)

    def count(self, name: str, text: str, side: int | None = None) -> None:
        """Adds a document to the histogram ``name``; ``side`` as in ``Histogram``."""
        self.histograms.setdefault(name, Histogram()).add(text, side)

    def add(self, other: Counters) -> None:
        """Adds the counts of another task."""
        for name in ("documents", "characters", "kept", "kept_characters", "rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for stage, reasons in other.removed.items():
            self.removed.setdefault(stage, Counter()).update(reasons)
        self.removed_characters.update(other.removed_characters)
        self.changed.update(other.changed)
        count_unread(self.unread, other.unread.items())
        for name, histogram in other.histograms.items():
            mine = self.histograms.setdefault(name, Histogram())
            for field in Histogram.model_fields:
                getattr(mine, field).update(getattr(histogram, field))
        for name, samples in other.samples.items():
            self.samples.setdefault(name, []).extend(samples)
            _bound(self.samples[name])


def small_picture(picture: Image.Image | bytes) -> str:
    """Returns a small JPEG file of an image or image file, in base64."""
    opened = Image.open(io.BytesIO(picture)) if isinstance(picture, bytes) else picture.copy()
    opened.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
    buffer = io.BytesIO()
    on_white(opened).save(buffer, "JPEG", quality=80)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _rank(identity: str) -> tuple[int, str]:
    return digest(identity), identity


def _limit(picture: object) -> int:
    return SAMPLES if picture is None else PICTURES


def _bound(samples: list[Sample]) -> None:
    samples.sort(key=lambda sample: _rank(sample.id))
    del samples[_limit(samples[0].picture) :]
