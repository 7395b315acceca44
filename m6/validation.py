"""The sections of a run's JSON as pydantic models, and what is wrong with one in a single line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict

from m6.errors import UserError, nearest

Model = TypeVar("Model", bound=BaseModel)
_SHOWN_CHARACTERS = 80
_KINDS = ("float", "constrained-float")


class Section(BaseModel):
    """A section of the JSON: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def validate(model: type[Model], value: Any, where: str) -> Model:
    """``value``, as it was read from JSON, as a ``model``; ``where`` is its dotted key, empty for the whole file.

    Types are taken literally: neither ``"4"`` nor ``true`` is a number.

    Raises:
        UserError: names the key, what was found and what was expected.
    """
    try:
        # Not as Python values: those would have to be a Path and a tuple where JSON has a string and an array.
        return model.model_validate_json(json.dumps(value), strict=True)
    except pydantic.ValidationError as error:
        raise UserError(describe(error, model, where)) from None


def parse_json(text: str) -> Any:
    """JSON in which no key of an object stands twice and every number is finite.

    Raises:
        ValueError: otherwise; a UserError where the text is JSON by its grammar.
    """
    return json.loads(text, object_pairs_hook=_no_duplicates, parse_float=_finite, parse_constant=_finite)


def check_keys(section: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raises UserError for the first key of ``section`` that is not ``valid``."""
    valid = set(valid)
    for key in section:
        if key not in valid:
            raise UserError(f"{_dotted(where, key)}: unknown key{nearest(key, valid)}")


def describe(error: pydantic.ValidationError, model: type[BaseModel] | None, where: str) -> str:
    """The first problem of a pydantic error in one line: the key, the value, what was expected."""
    problem = error.errors(include_url=False)[0]
    # Where a key takes values of two kinds, pydantic appends the kind that it tried.
    path = [str(part) for part in problem["loc"] if part not in _KINDS and "[" not in str(part)]
    name = _dotted(where, *path)
    if problem["type"] == "extra_forbidden" and model is not None:
        return f"{name}: unknown key{nearest(path[-1], _fields_at(model, path[:-1]))}"
    if problem["type"] == "missing":
        return f"{name}: missing"
    if problem["type"] in ("value_error", "assertion_error"):  # a check of several fields, which names them itself
        return f"{name}: {problem['ctx']['error']}"
    found = repr(problem["input"])
    if len(found) > _SHOWN_CHARACTERS:
        found = found[:_SHOWN_CHARACTERS] + "..."
    return f"{name}: {problem['msg'][0].lower()}{problem['msg'][1:]}, found {found}"


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        if part.isdigit():  # a place in a list, whose field named the model already
            continue
        field = model.model_fields.get(part)
        kinds = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
        models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not models:
            break
        model = models[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise UserError(f"{text} is not a finite number")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f'the key "{key}" is given twice')
    return dict(pairs)
