"""Where metrics go: RUN/metrics.jsonl always, Weights & Biases and TensorBoard when asked."""

from __future__ import annotations

from typing import Any

from m6.config import LoggingSettings
from m6.errors import UserError
from m6.training.run_directory import RunDirectory


class Trackers:
    """Writes one entry to every tracker that is on. Used on the main rank only."""

    def __init__(self, run: RunDirectory, settings: LoggingSettings, document: dict[str, Any]) -> None:
        self._run = run
        self._wandb: Any = None
        self._tensorboard: Any = None
        if settings.wandb != "off":
            try:
                import wandb
            except ImportError:
                raise UserError(
                    'm6.logging.wandb needs the package wandb: pip install "m6-recipes[tracking]"'
                ) from None
            self._wandb = wandb.init(
                project=settings.wandb_project,
                name=run.root.name,
                id=run.root.name,
                resume="allow",
                mode=settings.wandb,
                dir=str(run.root),
                config=document,
            )
        if settings.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    'm6.logging.tensorboard needs the package tensorboard: pip install "m6-recipes[tracking]"'
                ) from None
            self._tensorboard = SummaryWriter(str(run.root / "tensorboard"))

    def write(self, entry: dict[str, Any]) -> None:
        self._run.append_metrics(entry)
        flat = dict(_flatten(entry))
        if self._wandb is not None:
            self._wandb.log(flat, step=entry["step"])
        if self._tensorboard is not None:
            for key, value in flat.items():
                self._tensorboard.add_scalar(key, value, entry["step"])

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _flatten(value: Any, name: str = "") -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [item for key, entry in value.items() for item in _flatten(entry, f"{name}/{key}" if name else key)]
    if isinstance(value, list):
        return [item for index, entry in enumerate(value) for item in _flatten(entry, f"{name}/{index}")]
    return [(name, float(value))] if isinstance(value, (int, float)) else []
