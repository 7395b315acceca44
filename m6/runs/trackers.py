"""Writes metrics to RUN/metrics.jsonl and, if configured, to Weights & Biases and TensorBoard."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from m6.config.sections import LoggingSettings
from m6.errors import UserError
from m6.runs.directory import RunDirectory


def check_trackers(settings: LoggingSettings) -> None:
    """Raises UserError if the package of a configured tracker is not installed; imports nothing."""
    for package, enabled in (("wandb", settings.wandb != "off"), ("tensorboard", settings.tensorboard)):
        if enabled and importlib.util.find_spec(package) is None:
            raise UserError(f'm6.logging.{package} needs the package {package}: pip install "m6-recipes[tracking]"')


class Trackers:
    """Writes metrics to every enabled tracker. Only the main rank has one.

    Args:
        run: the folder of metrics.jsonl and of the trackers' files.
        document: the run's JSON, which Weights & Biases shows.
    """

    def __init__(self, run: RunDirectory, settings: LoggingSettings, document: dict[str, Any]) -> None:
        self._run = run
        self._wandb: Any = None
        self._tensorboard: Any = None
        # Both packages are optional and slow to import.
        if settings.wandb != "off":
            import wandb

            self._wandb = wandb.init(
                project=settings.wandb_project,
                name=run.root.name,
                id=run.root.name,
                resume="allow",  # the next attempt at the run continues the same curves
                mode=settings.wandb,
                dir=str(run.root),
                config=document,
            )
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run.root / "tensorboard"))

    def write(self, entry: dict[str, Any]) -> None:
        """Writes one line of metrics; ``entry`` holds "step"."""
        self._run.append_metrics(entry)
        flat = dict(_flatten(entry))
        if self._wandb is not None:
            self._wandb.log(flat, step=entry["step"])
        if self._tensorboard is not None:
            for key, value in flat.items():
                self._tensorboard.add_scalar(key, value, entry["step"])

    def show(self, name: str, picture: Path, step: int) -> None:
        """Sends a PNG to the trackers that show pictures."""
        if self._wandb is not None:
            import wandb

            self._wandb.log({name: wandb.Image(str(picture))}, step=step)
        if self._tensorboard is not None:
            from PIL import Image

            self._tensorboard.add_image(name, np.asarray(Image.open(picture)), step, dataformats="HWC")

    def close(self) -> None:
        """Flushes and closes the trackers."""
        if self._wandb is not None:
            self._wandb.finish()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _flatten(value: Any, name: str = "") -> list[tuple[str, float]]:
    """Turns nested metrics into pairs of a path such as ``experts/load_cv/0`` and a number."""
    if isinstance(value, dict):
        return [item for key, entry in value.items() for item in _flatten(entry, f"{name}/{key}" if name else key)]
    if isinstance(value, list):
        return [item for index, entry in enumerate(value) for item in _flatten(entry, f"{name}/{index}")]
    return [(name, float(value))] if isinstance(value, (int, float)) else []
