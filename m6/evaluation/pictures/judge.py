"""The judge: a small convolutional classifier of images by caption, trained on real images only."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from m6.data.pictures import to_unit_range
from m6.errors import DAMAGED, UserError, first_line
from m6.evaluation.pictures.captioned import CaptionedPictures
from m6.files import atomic_path, write_json
from m6.formatting import log_line
from m6.validation import Section, validate

_FORMAT = 2  # of a stored judge; in format 1, training images were in proportion to the data, not to the captions
_BATCH_SIZE = 256
_LOG_STEPS = 100  # between log lines, if stderr is not a terminal
_SETTINGS_FILE, _WEIGHTS_FILE = "judge.json", "judge.safetensors"
_LABEL_SMOOTHING = 0.1
_MAX_SHIFT = 4  # largest random shift of training images in pixels


class JudgeSettings(Section):
    """Network and training of the judge."""

    image_size: PositiveInt = Field(64, description="side of a picture in pixels")
    channels: list[PositiveInt] = Field([16, 32, 64, 128], min_length=1, description="each level halves the side")
    total_steps: PositiveInt = Field(1500, description="training steps")
    batch_size: PositiveInt = Field(32, description="pictures per step")
    learning_rate: PositiveFloat = Field(4e-3, description="peak of the learning rate")
    seed: int = Field(0, ge=0, description="seed of initial weights, order of pictures and augmentation")


class Judge(nn.Module):
    """A classifier: per level a strided and a plain convolution, the mean over positions, and a linear layer.

    Attributes:
        captions: the classes.
        num_features: width of ``features``.
    """

    def __init__(self, settings: JudgeSettings, captions: list[str]) -> None:
        super().__init__()
        self.settings, self.captions = settings, captions
        self.num_features = settings.channels[-1]
        layers: list[nn.Module] = []
        width = 3
        for channels in settings.channels:
            layers += [*_block(width, channels, stride=2), *_block(channels, channels, stride=1)]
            width = channels
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(width, len(captions))

    def features(self, pixels: Tensor) -> Tensor:
        """Maps images ``[B, 3, H, H]`` in [0, 1] to features ``[B, num_features]``."""
        return self.trunk(2 * pixels - 1).mean(dim=(2, 3))

    def forward(self, pixels: Tensor) -> Tensor:
        """Maps images ``[B, 3, H, H]`` in [0, 1] to logits ``[B, len(captions)]``."""
        return self.head(self.features(pixels))

    @torch.no_grad()
    def apply_to(self, pictures: CaptionedPictures, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns features ``[n, num_features]`` and logits ``[n, len(captions)]`` of n images, on the CPU."""
        self.eval()
        features = [
            self.features(to_unit_range(pictures.pixels[first : first + _BATCH_SIZE], device)).cpu()
            for first in range(0, len(pictures), _BATCH_SIZE)
        ]
        stacked = torch.cat(features) if features else torch.empty(0, self.num_features)
        # The head runs on the CPU on the returned features, so both results agree exactly.
        return stacked, F.linear(stacked, self.head.weight.cpu(), self.head.bias.cpu())


def load_or_train_judge(
    pictures: CaptionedPictures, settings: JudgeSettings, folder: Path | None, device: torch.device
) -> Judge:
    """Loads the judge from ``folder``, or trains one and saves it there.

    Args:
        pictures: real images to train on.
        settings: network and training.
        folder: folder of the judge; None: train one and do not save it.
        device: device of the judge.

    Raises:
        UserError: the stored judge was trained with other settings, on other images or by an older version, or its
            files are damaged.
    """
    fingerprint = _fingerprint(pictures)
    if folder is not None and (folder / _SETTINGS_FILE).is_file():
        return _load(folder, settings, fingerprint).to(device).eval()
    judge = train_judge(pictures, settings, device)
    if folder is not None:
        with atomic_path(folder / _WEIGHTS_FILE) as temporary:
            save_file({name: tensor.cpu().contiguous() for name, tensor in judge.state_dict().items()}, temporary)
        document = {
            "format": _FORMAT,
            "settings": settings.model_dump(),
            "pictures": fingerprint,
            "captions": judge.captions,
        }
        # Written last: a folder with this file has complete weights.
        write_json(folder / _SETTINGS_FILE, document)
    return judge


def train_judge(pictures: CaptionedPictures, settings: JudgeSettings, device: torch.device) -> Judge:
    """Trains a judge on real images, balanced over captions, with random shifts and contrast."""
    captions = sorted(set(pictures.captions))
    index = {caption: number for number, caption in enumerate(captions)}
    torch.manual_seed(settings.seed)
    judge = Judge(settings, captions).to(device).train()
    optimizer = torch.optim.AdamW(judge.parameters(), weight_decay=0.05)
    labels = torch.tensor([index[caption] for caption in pictures.captions])
    # Captions are balanced: otherwise captions with thousands of images would crowd out captions with four.
    rows = [torch.nonzero(labels == number).flatten() for number in range(len(captions))]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, settings.total_steps)
    order = torch.empty(0, dtype=torch.int64)
    progress = tqdm(range(settings.total_steps), "judge", unit=" steps", disable=None)
    for step in progress:
        while len(order) < settings.batch_size:
            one_of_each = torch.stack([of[torch.randint(len(of), ())] for of in rows])
            order = torch.cat([order, one_of_each[torch.randperm(len(rows))]])
        batch, order = order[: settings.batch_size], order[settings.batch_size :]
        pixels = _augment(to_unit_range(pictures.pixels[batch.numpy()], device))
        loss = F.cross_entropy(judge(pixels), labels[batch].to(device), label_smoothing=_LABEL_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if progress.disable and (step + 1) % _LOG_STEPS == 0:
            log_line(f"judge: step {step + 1:,} of {settings.total_steps:,}, loss {loss.item():.3f}")
    return judge.eval()


def _augment(pixels: Tensor) -> Tensor:
    """Shifts all images of a batch by the same few pixels, and scales the contrast of each."""
    down, right = torch.randint(-_MAX_SHIFT, _MAX_SHIFT + 1, (2,)).tolist()
    contrast = 0.8 + 0.4 * torch.rand(len(pixels), 1, 1, 1, device=pixels.device)
    padded = F.pad(pixels, [_MAX_SHIFT] * 4, mode="replicate").roll((down, right), dims=(2, 3))
    side = pixels.shape[-1]
    shifted = padded[..., _MAX_SHIFT : _MAX_SHIFT + side, _MAX_SHIFT : _MAX_SHIFT + side]
    return 1 - (1 - shifted) * contrast  # white, the background of drawings, stays white


def _block(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()


def _fingerprint(pictures: CaptionedPictures) -> str:
    digest = hashlib.sha256(json.dumps(pictures.captions).encode())
    digest.update(pictures.pixels.tobytes())
    return digest.hexdigest()


def _load(folder: Path, settings: JudgeSettings, fingerprint: str) -> Judge:
    try:
        document: dict[str, Any] = json.loads((folder / _SETTINGS_FILE).read_bytes())
        recorded = validate(JudgeSettings, document["settings"], "settings")
        if document.get("format") != _FORMAT:
            raise UserError("was trained by an older version, in another way; choose another folder")
        if recorded != settings or document["pictures"] != fingerprint:
            raise UserError("was trained with other settings or on other pictures; choose another folder")
        judge = Judge(settings, document["captions"])
        judge.load_state_dict(load_file(folder / _WEIGHTS_FILE))
    except (*DAMAGED, SafetensorError) as error:
        raise UserError(f"the judge in {folder}: {first_line(error)}") from None
    return judge


_CHOICES = 5
_JOINT = "的"  # between the words of a caption such as 红色的圆形


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the judge: the share of correctly classified images of a caption, averaged over the captions.

    Attributes:
        captions, pictures: numbers of judged captions and images.
        top_1, top_5: share of images with the correct caption as the judge's best guess, or among its best five.
        of_five: share of images with the correct caption ranked above four random other captions.
        words: for captions of two words such as 红色的圆形, the shares of images with a correct first and second word
            in the best guess; None if there are no such captions.
    """

    captions: int
    pictures: int
    top_1: float
    top_5: float
    of_five: float
    words: tuple[float, float] | None = None


def accuracy(judge: Judge, pictures: CaptionedPictures, scores: Tensor, captions: set[str]) -> Accuracy | None:
    """Returns the judge's accuracy on the images with one of ``captions``; None if there are none.

    Args:
        judge: the judge; its classes are the columns of ``scores``.
        pictures: n images.
        scores: [n, classes] logits.
        captions: captions of the images to count.
    """
    index = {caption: number for number, caption in enumerate(judge.captions)}
    composed = _composed(judge.captions)
    rng = np.random.default_rng(0)
    hits: dict[str, list[tuple[bool, ...]]] = collections.defaultdict(list)
    word_hits: dict[str, list[tuple[bool, bool]]] = collections.defaultdict(list)
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices.tolist()
    for caption, guesses, row in zip(pictures.captions, best, scores.numpy(), strict=True):
        if caption not in captions:
            continue
        right = index[caption]
        others = np.delete(np.arange(len(judge.captions)), right)
        others = rng.choice(others, size=min(_CHOICES - 1, len(others)), replace=False)
        hits[caption].append((guesses[0] == right, right in guesses, bool((row[others] < row[right]).all())))
        if caption in composed:
            first, second = composed[caption]
            guess_first, _, guess_second = judge.captions[guesses[0]].partition(_JOINT)
            word_hits[caption].append((guess_first == first, guess_second == second))
    if not hits:
        return None
    top_1, top_5, of_five = _mean(hits)
    words = None
    if word_hits:
        first_share, second_share = _mean(word_hits)
        words = (first_share, second_share)
    return Accuracy(len(hits), sum(map(len, hits.values())), top_1, top_5, of_five, words)


def _mean(hits: Mapping[str, Sequence[tuple[bool, ...]]]) -> list[float]:
    return np.array([np.mean(rows, axis=0) for rows in hits.values()]).mean(axis=0).tolist()


def _composed(captions: list[str]) -> dict[str, tuple[str, str]]:
    """The captions of two words, if both words also occur in other captions of two words."""
    parts = {caption: tuple(caption.split(_JOINT)) for caption in captions}
    pairs = {caption: (part[0], part[1]) for caption, part in parts.items() if len(part) == 2 and all(part)}
    firsts = collections.Counter(first for first, _ in pairs.values())
    seconds = collections.Counter(second for _, second in pairs.values())
    return {caption: pair for caption, pair in pairs.items() if firsts[pair[0]] > 1 and seconds[pair[1]] > 1}
