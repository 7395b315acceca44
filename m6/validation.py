"""The sections of a run's JSON as pydantic models, and what is wrong with one in a single line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
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


def read_document(path: Path, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """The object in a JSON file, with values replaced.

    Args:
        path: the JSON file.
        overrides: ``key.path=value`` strings; the value is JSON, or else a plain string.

    Raises:
        UserError: for a missing file, broken JSON, or an override that does not fit; the message names it.
    """
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(document).__name__}")
    for override in overrides:
        _apply_override(document, override)
    return document


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
    is_unknown_key = problem["type"] == "extra_forbidden"
    # Where a key takes values of two kinds, pydantic names the kind that it tried; an unknown key may be called alike.
    last = len(problem["loc"]) - 1
    parts = enumerate(problem["loc"])
    path = [str(part) for place, part in parts if not _is_kind(part) or (is_unknown_key and place == last)]
    name = _dotted(where, *path)
    if is_unknown_key and model is not None:
        return f"{name}: unknown key{nearest(path[-1], _fields_at(model, path[:-1]))}"
    if problem["type"] == "missing":
        return f"{name}: missing"
    if problem["type"] in ("value_error", "assertion_error"):  # a check of several fields, which names them itself
        return ": ".join(filter(None, (name, str(problem["ctx"]["error"]))))
    found = repr(problem["input"])
    if len(found) > _SHOWN_CHARACTERS:
        found = found[:_SHOWN_CHARACTERS] + "..."
    return f"{name}: {problem['msg'][0].lower()}{problem['msg'][1:]}, found {found}"


def _is_kind(part: int | str) -> bool:
    return part in _KINDS or "[" in str(part)


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


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override}: expected KEY.PATH=VALUE, for example m6.model.num_layers=4")
    try:
        value = parse_json(text)
    except UserError as error:
        raise UserError(f"--set {override}: {error}") from None
    except (ValueError, RecursionError):
        value = text  # a plain string
    *parents, last = key.split(".")
    if not all((*parents, last)):
        raise UserError(f"--set {override}: an empty name in {key}")
    node = document
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {override}: {parent} is not a section")
    node[last] = value
