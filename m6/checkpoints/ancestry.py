"""RUN/initial.json: which run a run's initial weights come from, and what that one was trained on.

The file outlives that run: the model card of an export names all data that the weights have seen.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from m6.checkpoints.loading import is_exported, newest_complete_checkpoint
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
        steps, samples_seen, tokens_seen: of its checkpoint.
        objectives: those that were trained, with their weights.
        sources: what ``kept_sources`` returns of it.
        initial: the run that its own initial weights come from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    steps: int
    samples_seen: int
    tokens_seen: int
    objectives: dict[str, float]
    sources: Manifest | None = None
    initial: InitialRun | None = None

    def lineage(self) -> list[InitialRun]:
        """Returns this run and those before it, the newest first."""
        return [self, *(self.initial.lineage() if self.initial else [])]


def keep_initial(root: Path, init: Path | None) -> None:
    """Writes RUN/initial.json, if there is none and ``init`` is a run: an exported model has a card of its own.

    A run of an older version, which has no such file, may resume when ``init`` is gone: nothing is written then.
    """
    if init is None or (root / INITIAL).exists() or not init.exists() or is_exported(init):
        return
    state = newest_complete_checkpoint(init).state
    record = InitialRun(
        name=init.absolute().name,
        steps=state["step"],
        samples_seen=state["samples_seen"],
        tokens_seen=state["tokens_seen"],
        objectives=trained_objectives(load_config(init / "config.json")),
        sources=kept_sources(init),
        initial=kept_initial(init),
    )
    write_json(root / INITIAL, record.model_dump(exclude_none=True))


def kept_initial(root: Path) -> InitialRun | None:
    """What ``keep_initial`` wrote, or None.

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
