"""``m6 evaluate-pictures``: compares generated images with real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from m6.errors import UserError
from m6.evaluation.pictures.captioned import CaptionedPictures, RealPictures
from m6.evaluation.pictures.comparison import (
    COPY_PSNR_DB,
    Distances,
    distances_by_inception,
    distances_of_features,
    find_nearest,
)
from m6.evaluation.pictures.judge import Accuracy, Judge, accuracy
from m6.formatting import markdown_table


@dataclass(frozen=True)
class Group:
    """Accuracy on the generated images of some captions, and on real held-out images of the same captions.

    ``real`` is None if there are no such held-out images.
    """

    generated: Accuracy
    real: Accuracy | None

    @property
    def ratio(self) -> float | None:
        """Accuracy on generated images divided by the accuracy on real ones; None if the latter is unknown or 0."""
        return self.generated.top_1 / self.real.top_1 if self.real is not None and self.real.top_1 > 0 else None


@dataclass(frozen=True)
class Copies:
    """Similarity of images to their nearest training images.

    Attributes:
        pictures: number of images.
        median_psnr_db: median PSNR to the nearest training image in dB.
        copies: share of images with a PSNR of at least COPY_PSNR_DB.
        same_caption: share of images with the caption of their nearest training image.
    """

    pictures: int
    median_psnr_db: float
    copies: float
    same_caption: float


@dataclass(frozen=True)
class PictureReport:
    """All measures of a set of generated images.

    Attributes:
        groups: accuracies on captions of the training split (SEEN), and on other captions (UNSEEN).
        unjudged: number of generated images with captions unknown to the judge.
        skipped: unusable files, with the reason.
        distances: FID and KID by set and features.
        nearest: similarity to training images by set.
    """

    groups: dict[str, Group]
    unjudged: int
    skipped: dict[str, str]
    distances: dict[str, Distances]
    nearest: dict[str, Copies]

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        document = asdict(self)
        for name, group in self.groups.items():
            document["groups"][name]["ratio"] = group.ratio
        return document


SEEN, UNSEEN = "seen in training", "not seen in training"


def judged_part(generated: CaptionedPictures, known: Sequence[str]) -> CaptionedPictures:
    """The generated images with captions known to a judge; UserError if there are none."""
    names = set(known)
    judged = generated.where([caption in names for caption in generated.captions])
    if not len(judged):
        raise UserError(
            f'the judge knows none of the generated captions, such as "{generated.captions[0]}"; it knows captions '
            f'such as "{known[0]}"'
        )
    return judged


def evaluate_pictures(
    generated: CaptionedPictures,
    skipped: dict[str, str],
    real: RealPictures,
    judge: Judge,
    device: torch.device,
    inception: nn.Module | None = None,
) -> PictureReport:
    """Measures generated images.

    Args:
        generated: images of the judge's image_size.
        skipped: unusable files, with the reason.
        real: the real images; the judge was trained on ``real.judged``.
        judge: the judge, on ``device``.
        device: device of the judge.
        inception: if given, FID and KID are also computed on its features.

    Raises:
        UserError: see ``judged_part``.
    """
    judged = judged_part(generated, judge.captions)
    # Generated and real images are compared on the same captions only.
    judged_captions = set(judged.captions)
    held_out = real.held_out.where([caption in judged_captions for caption in real.held_out.captions])
    sample = real.judged.where([caption in judged_captions for caption in real.judged.captions])
    features, scores = judge.apply_to(judged, device)
    held_out_features, held_out_scores = judge.apply_to(held_out, device)
    sample_features, _ = judge.apply_to(sample, device)
    groups, trained_on = {}, real.seen
    for name, is_seen in ((SEEN, True), (UNSEEN, False)):
        captions = {caption for caption in judged_captions if (caption in trained_on) == is_seen}
        on_generated = accuracy(judge, judged, scores, captions)
        if on_generated is not None:
            groups[name] = Group(on_generated, accuracy(judge, held_out, held_out_scores, captions))
    sets = {"generated": (judged, features), "real held-out": (held_out, held_out_features)}
    sets = {name: one for name, one in sets.items() if min(len(one[0]), len(sample)) > 1}  # a variance needs 2
    distances = {
        f"{name}, judge's features": distances_of_features(f, sample_features) for name, (_, f) in sets.items()
    }
    if inception is not None:
        distances |= {
            f"{name}, Inception": distances_by_inception(p, sample, inception) for name, (p, _) in sets.items()
        }
    nearest = {"generated": copies(generated, real.training)}
    if len(held_out):
        # Against real.judged: real.training contains the held-out style, so held-out images would find themselves.
        nearest["real held-out"] = copies(held_out, real.judged)
    return PictureReport(groups, len(generated) - len(judged), skipped, distances, nearest)


def copies(pictures: CaptionedPictures, among: CaptionedPictures) -> Copies:
    """Measures the similarity of images to the nearest images of ``among``."""
    nearest = find_nearest(pictures, among)
    same = [among.captions[place] == caption for place, caption in zip(nearest.place, pictures.captions, strict=True)]
    return Copies(len(pictures), float(np.median(nearest.psnr_db)), nearest.copies, float(np.mean(same)))


def markdown(report: PictureReport) -> str:
    """Returns the report as Markdown tables."""
    header = ["captions", "pictures", "number of captions", "number", "found (best five)", "of five captions"]
    header += ["first word", "second word"]
    groups, ratios = [], []
    for name, group in report.groups.items():
        for kind, found in (("generated", group.generated), ("real, held out", group.real)):
            if found is not None:
                groups.append([name, kind, f"{found.captions:,}", f"{found.pictures:,}", *_shares(found)])
        if group.ratio is not None:
            ratios.append(f"{group.ratio:.2f} ({name})")
    distances = [[name, f"{d.fid:.2f}", f"{d.kid:.4f} ({d.kid_std:.4f})"] for name, d in report.distances.items()]
    nearest = [
        [name, f"{c.pictures:,}", f"{c.median_psnr_db:.1f}", f"{c.copies:.1%}", f"{c.same_caption:.1%}"]
        for name, c in report.nearest.items()
    ]
    from_db = f"from {COPY_PSNR_DB:.0f} dB"
    lines = [
        markdown_table(header, groups),
        "",
        f"Found in generated pictures / found in real ones: {', '.join(ratios) or 'unknown'}",
        "",
        markdown_table(["against the judge's real pictures", "FID", "KID (standard deviation)"], distances),
        "",
        markdown_table(["nearest training picture", "pictures", "PSNR (dB, median)", from_db, "same caption"], nearest),
    ]
    lines += [
        "",
        f"{report.unjudged} pictures have captions that the judge does not know; {len(report.skipped)} skipped.",
    ]
    lines += [f"- {file}: {reason}" for file, reason in report.skipped.items()]
    return "\n".join(lines) + "\n"


def _shares(accuracy: Accuracy) -> list[str]:
    words = ["", ""] if accuracy.words is None else [f"{share:.1%}" for share in accuracy.words]
    return [f"{accuracy.top_1:.1%} ({accuracy.top_5:.1%})", f"{accuracy.of_five:.1%}", *words]
