"""Saves and restores the training of an image tokenizer in one safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from m6.errors import DAMAGED, UserError, first_line
from m6.files import atomic_path

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
