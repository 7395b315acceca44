"""RUN/initial.json: which run a run's initial weights come from, and what that one was trained on.

The file outlives that run: the model card of an export names all data that the weights have seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from m6.checkpoints.finetuning import is_exported
from m6.checkpoints.loading import newest_complete_checkpoint
from m6.config.run import RunConfig, load_config
from m6.data.manifest import Manifest
from m6.data.objectives import OBJECTIVES
from m6.errors import UserError
from m6.files import write_json
from m6.runs.data import kept_sources
from m6.runs.directory import INITIAL


class InitialRun(BaseModel):
    """The run that gave the initial weights.

    Attributes:
        name: of its folder.
        steps, samples_seen, tokens_seen: of its checkpoint; None: nothing is known but the name.
        objectives: those that were trained, with their weights.
        sources: what ``kept_sources`` returns of it.
        initial: the run that its own initial weights come from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    steps: int | None = None
    samples_seen: int | None = None
    tokens_seen: int | None = None
    objectives: dict[str, float] = {}
    sources: Manifest | None = None
    initial: InitialRun | None = None

    def lineage(self) -> list[InitialRun]:
        """Returns this run and those before it, the newest first."""
        return [self, *(self.initial.lineage() if self.initial else [])]


def keep_initial(root: Path, init: Path | None) -> None:
    """Writes RUN/initial.json, if there is none: what is known of the run or the exported model ``init``.

    A run of an older version, which has no such file, may resume when ``init`` is gone: nothing is written then.
    """
    if init is None or (root / INITIAL).exists() or not init.exists():
        return
    if is_exported(init):
        record = kept_initial(init) or InitialRun(name=init.absolute().name)
    else:
        record = initial_record(init, newest_complete_checkpoint(init).state)
    write_record(root, record)


def initial_record(run_dir: Path, state: Mapping[str, Any]) -> InitialRun:
    """What will be known of a run where its weights are trained further.

    Args:
        run_dir: the run.
        state: of its checkpoint.
    """
    config = load_config(run_dir / "config.json")
    return InitialRun(
        name=run_dir.absolute().name,
        steps=state["step"],
        samples_seen=state["samples_seen"],
        tokens_seen=state["tokens_seen"],
        objectives=trained_objectives(config),
        sources=kept_sources(run_dir),
        initial=initial_of(run_dir, config),
    )


def write_record(folder: Path, record: InitialRun) -> None:
    """Writes initial.json: in a run it is of the run before, and in an exported model of the run that was exported."""
    write_json(folder / INITIAL, record.model_dump(exclude_none=True))


def initial_of(run_dir: Path, config: RunConfig) -> InitialRun | None:
    """The run that a run's initial weights come from; None if they are random. Without a record only its name is known.

    Raises:
        UserError: the record is damaged.
    """
    init = config.m6.init
    return kept_initial(run_dir) or (None if init is None else InitialRun(name=init.absolute().name))


def kept_initial(root: Path) -> InitialRun | None:
    """What ``write_record`` wrote, or None.

    Raises:
        UserError: the file is damaged.
    """
    file = root / INITIAL
    if not file.exists():
        return None
    try:
        return InitialRun.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(f"{file}: corrupt: {error.errors()[0]['msg']}") from None


def trained_objectives(config: RunConfig) -> dict[str, float]:
    """The objectives that a run trains, with their weights."""
    weights = {name: config.m6.objectives.of(name).weight for name in OBJECTIVES}
    return {name: weight for name, weight in weights.items() if weight}
