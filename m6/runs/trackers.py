"""Writes metrics to RUN/metrics.jsonl and, if configured, to Weights & Biases and TensorBoard."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from m6.config.sections import LoggingSettings
from m6.errors import StorageError, UserError, nearest
from m6.files import read_note, write_text
from m6.runs.directory import TENSORBOARD, WANDB_ID, RunDirectory

_ONLINE, _OFFLINE = ("online", "run", "shared"), ("offline", "dryrun", "disabled")  # values of WANDB_MODE


def check_trackers(settings: LoggingSettings, with_credentials: bool) -> None:
    """Checks whether the configured trackers can start.

    Args:
        with_credentials: whether to look for an API key too. Only the main rank needs it, since it writes the metrics.

    Raises:
        UserError: a package or an API key is missing, or WANDB_MODE is no mode.
    """
    for package, enabled in (("wandb", settings.wandb != "off"), ("tensorboard", settings.tensorboard)):
        if enabled and importlib.util.find_spec(package) is None:
            raise UserError(f'm6.logging.{package} needs the package {package}: pip install "m6-recipes[tracking]"')
    mode = _wandb_mode(settings)
    if mode not in ("off", *_ONLINE, *_OFFLINE):
        raise UserError(f"WANDB_MODE is {mode!r}{nearest(mode, (*_ONLINE, *_OFFLINE))}")
    if with_credentials and mode in _ONLINE:
        _check_wandb_key()


def _wandb_mode(settings: LoggingSettings) -> str:
    """The mode of Weights & Biases: a machine without a network may set WANDB_MODE, and wandb.init would ignore it."""
    return settings.wandb if settings.wandb == "off" else os.environ.get("WANDB_MODE") or settings.wandb


def _check_wandb_key() -> None:
    import wandb

    # These are private in wandb 0.31.0. The public login() also asks the server, and waits if it does not answer.
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib.wbauth import authenticate_session

    remedy = 'run "wandb login", set WANDB_API_KEY, or use "offline"'
    try:
        host = wandb_setup.singleton().settings.base_url
        found = authenticate_session(host=host, source="m6", prompt=False, update_session=False)
    except wandb.errors.Error as error:
        raise UserError(f'm6.logging.wandb "online": {error}; {remedy}') from None
    if found is None:
        raise UserError(f'm6.logging.wandb "online": there is no API key; {remedy}')


def _start_wandb(run: RunDirectory, settings: LoggingSettings, document: dict[str, Any], mode: str) -> Any:
    import wandb

    tracked = wandb.init(
        project=settings.wandb_project,
        group=settings.wandb_group,
        name=settings.wandb_name or run.root.name,
        id=_wandb_id(run),
        resume="allow",  # the next attempt at the run continues the same curves
        mode=mode,  # type: ignore[arg-type]  # check_trackers refused other values
        dir=str(run.root),
        config=document,
    )
    # The service numbers all entries, and drops an entry with a smaller number than the last. A resumed attempt repeats
    # steps, so the step is a metric of its own, and the horizontal axis of all others.
    tracked.define_metric("step")
    tracked.define_metric("*", step_metric="step")
    return tracked


class Trackers:
    """Writes metrics to every enabled tracker. Only the main rank has one.

    Args:
        run: the folder of metrics.jsonl and of the trackers' files.
        document: the run's JSON, shown by Weights & Biases.
        step: the last step before this attempt. TensorBoard forgets points of later steps, since they are repeated.

    Raises:
        StorageError: Weights & Biases does not take this run.
    """

    def __init__(self, run: RunDirectory, settings: LoggingSettings, document: dict[str, Any], step: int = 0) -> None:
        self._run = run
        self._wandb: Any = None
        self._tensorboard: Any = None
        # Both packages are optional and slow to import.
        if settings.wandb != "off":
            import wandb

            try:
                self._wandb = _start_wandb(run, settings, document, _wandb_mode(settings))
            except wandb.errors.Error as error:
                # wandb's error for a key unknown to the server is a CommError, too.
                refused = isinstance(error, wandb.errors.AuthenticationError)
                if refused or not isinstance(error, wandb.errors.CommError):
                    raise StorageError(f"m6.logging.wandb: {error}") from None
                kept = f'this attempt writes into {run.root / "wandb"} alone, which "wandb sync" sends later'
                print(f"warning: m6.logging.wandb: {error}; {kept}", flush=True)
                self._wandb = _start_wandb(run, settings, document, "offline")
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run.root / TENSORBOARD), purge_step=step + 1)

    def write(self, entry: dict[str, Any]) -> None:
        """Writes one line of metrics; ``entry`` holds "step"."""
        self._run.append_metrics(entry)
        flat = dict(_flatten(entry))
        if self._wandb is not None:
            self._wandb.log(flat)
        if self._tensorboard is not None:
            for key, value in flat.items():
                self._tensorboard.add_scalar(key, value, entry["step"])

    def show(self, name: str, picture: Path, step: int) -> None:
        """Sends a PNG to the trackers."""
        if self._wandb is not None:
            import wandb

            self._wandb.log({name: wandb.Image(str(picture)), "step": step})
        if self._tensorboard is not None:
            from PIL import Image

            self._tensorboard.add_image(name, np.asarray(Image.open(picture)), step, dataformats="HWC")

    def close(self) -> None:
        """Flushes and closes the trackers."""
        if self._wandb is not None:
            self._wandb.finish()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _wandb_id(run: RunDirectory) -> str:
    """The id of the run in Weights & Biases: random, made once for its folder, since other runs may have its name."""
    file = run.root / WANDB_ID
    if not file.exists():
        write_text(file, secrets.token_hex(8) + "\n")
    found = read_note(file)
    if not re.fullmatch(r"[\w-]{1,64}", found, re.ASCII):
        raise UserError(f"{file}: corrupt: {found!r:.80} is no id of Weights & Biases; remove it to begin new curves")
    return found


def _flatten(value: Any, name: str = "") -> list[tuple[str, float]]:
    """Turns nested metrics into pairs of a path such as ``experts/load_cv/0`` and a number."""
    if isinstance(value, dict):
        return [item for key, entry in value.items() for item in _flatten(entry, f"{name}/{key}" if name else key)]
    if isinstance(value, list):
        return [item for index, entry in enumerate(value) for item in _flatten(entry, f"{name}/{index}")]
    return [(name, float(value))] if isinstance(value, (int, float)) else []
