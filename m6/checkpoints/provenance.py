"""RUN/initial.json: the run of the initial weights, and its training data.

The file stays when the earlier run is deleted. The model card of an export can so name all data seen by the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from m6.checkpoints.finetuning import is_exported
from m6.checkpoints.loading import newest_complete_checkpoint
from m6.config.run import RunConfig, load_config
from m6.data.manifest import Manifest
from m6.data.objectives import OBJECTIVES
from m6.files import write_json
from m6.runs.data import kept_sources
from m6.runs.directory import INITIAL
from m6.validation import read_record


class InitialRun(BaseModel):
    """The run of the initial weights.

    Attributes:
        name: of its folder.
        steps, samples_seen, tokens_seen: of its checkpoint; None: only the name is known.
        objectives: the trained objectives with their weights.
        sources: its ``kept_sources``.
        initial: the run of its own initial weights.
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


def keep_initial(root: Path, init: Path) -> None:
    """Writes RUN/initial.json with the record of the run or exported model ``init``, unless the file exists.

    A run without such a file may resume after ``init`` was deleted: then nothing is written.
    """
    if (root / INITIAL).exists() or not init.exists():
        return
    if is_exported(init):
        record = kept_initial(init) or InitialRun(name=init.absolute().name)
    else:
        record = initial_record(init, newest_complete_checkpoint(init).state)
    write_record(root, record)


def initial_record(run_dir: Path, state: Mapping[str, Any]) -> InitialRun:
    """The record of a run for further training of its weights.

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
    """Writes initial.json: into a run the record of the earlier run, into an export the record of the exported run."""
    write_json(folder / INITIAL, record.model_dump(exclude_none=True))


def initial_of(run_dir: Path, config: RunConfig) -> InitialRun | None:
    """The run of a run's initial weights; None if they are random. Without a record only its name is known.

    Raises:
        UserError: the record is damaged.
    """
    init = config.m6.init
    return kept_initial(run_dir) or (None if init is None else InitialRun(name=init.absolute().name))


def kept_initial(root: Path) -> InitialRun | None:
    """Reads initial.json of a run or of an exported model; None if there is no such file.

    Raises:
        UserError: the file is damaged.
    """
    return read_record(InitialRun, root / INITIAL)


def trained_objectives(config: RunConfig) -> dict[str, float]:
    """The objectives trained by a run, with their weights."""
    weights = {name: config.m6.objectives.of(name).weight for name in OBJECTIVES}
    return {name: weight for name, weight in weights.items() if weight}
