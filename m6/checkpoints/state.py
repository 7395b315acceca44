"""The training state in a checkpoint's manifest: the types of the known keys, and a message for a missing one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from m6.errors import UserError
from m6.validation import MAX_NUMBER, validate

_Count = Annotated[int, Field(ge=0, le=int(MAX_NUMBER))]


class _Part(BaseModel):
    """A later version may add keys."""

    model_config = ConfigDict(extra="allow", frozen=True)


class _Sharing(_Part):
    num_layers: int = Field(gt=0)
    num_groups: int = Field(gt=0)
    parts: list[str]


class _Stage(_Part):
    stage: Literal["pseudo", "real"]
    switch_step: _Count | None
    sharing: _Sharing
    rule: dict[str, float | None] = {}


class _Adapters(_Part):
    rank: int = Field(gt=0)
    alpha: float


class _State(_Part):
    """Tools write parts of a state, so no key is required here, see ``TrainingState``."""

    step: _Count = 0
    optimizer_step: _Count = 0
    samples_seen: _Count = 0
    tokens_seen: _Count = 0
    tokenizer: str = ""
    image_tokenizer: str | None = None
    model: dict[str, Any] = {}
    next_learning_rate: float | None = None
    lora: _Adapters | None = None
    any_world: dict[str, Any] | None = None
    pseudo_to_real: _Stage | None = None
    loss_scaler: dict[str, float] = {}
    late_update: dict[str, float] | None = None


class TrainingState(dict[str, Any]):
    """The state of a checkpoint; to read a missing key is an error of its file.

    Args:
        values: the parsed JSON.
        where: the file, for the message about a missing key.

    Raises:
        UserError: a value has another type than its key; the message names both.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        try:
            validate(_State, values, "state")
        except UserError as error:
            raise UserError(f"corrupt: {error}") from None
        super().__init__(values)
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise UserError(f'{self._where}: corrupt: its state has no "{key}"')
