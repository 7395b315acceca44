"""Strict validation of JSON documents with pydantic, and error messages of one line."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict
from pydantic_core import ErrorDetails

from m6.errors import UserError, nearest
from m6.files import without_comments

Model = TypeVar("Model", bound=BaseModel)
_SHOWN_CHARACTERS = 80
_LISTED_KEYS = 10
MAX_NUMBER = 1e18
"""Far above any size, count or rate of a run; larger numbers would overflow in their use."""
# pydantic adds the tried member of a union to the location of an error. These are the plain names of members.
_UNION_MEMBERS = ("float", "constrained-float")
_IN_NO_NAME = re.compile("[\0\ud800-\udfff]")  # NUL, and half a surrogate pair of UTF-16


class Section(BaseModel):
    """Base class of all sections of a JSON document: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def validate(model: type[Model], value: Any, where: str, *, strict: bool = True) -> Model:
    """Validates a parsed JSON value and returns it as a ``model``.

    Args:
        model: the pydantic model.
        value: parsed JSON.
        where: dotted key of the value in its file, for messages; empty for the whole file.
        strict: neither ``"4"`` nor ``true`` is accepted as a number, nor 4.0 as an integer.

    Raises:
        UserError: the value does not fit. The message names the key, the value and the expected values.
    """
    try:
        # Validated as JSON text: in strict mode Python values would have to be a Path and a tuple where JSON has a
        # string and an array.
        return model.model_validate_json(json.dumps(value), strict=strict)
    except pydantic.ValidationError as error:
        raise UserError(describe(error, model, where)) from None


def read_document(path: Path, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads a JSON object from a file and applies overrides.

    Args:
        path: the JSON file. It may hold comments, see ``without_comments``.
        overrides: ``key.path=value`` strings. A value is taken as a plain string if it is not JSON.

    Raises:
        UserError: the file is missing or not valid JSON, or an override does not fit. The message names the file or
            the override.
    """
    try:
        document = parse_json(without_comments(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; expected a JSON file") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(document).__name__}")
    for override in overrides:
        _apply_override(document, override)
    return document


def read_model(model: type[Model], path: Path) -> Model:
    """Reads a JSON file as a ``model``.

    Raises:
        UserError: the file is missing or not valid JSON, or a key or value is wrong; the message names the file.
    """
    document = read_document(path)
    try:
        return validate(model, document, "")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def read_record(model: type[Model], file: Path) -> Model | None:
    """Reads a JSON file that this program wrote; None if there is no such file.

    Raises:
        UserError: the file is damaged; the message names the file and the key.
    """
    if not file.exists():
        return None
    try:
        return model.model_validate_json(file.read_bytes())
    except pydantic.ValidationError as error:
        raise UserError(f"{file}: corrupt: {describe(error, model, '')}") from None


def parse_json(text: str) -> Any:
    """Parses JSON; duplicate keys and non-finite numbers are errors.

    Raises:
        UserError: a duplicate key, NaN, Infinity, a number above ``MAX_NUMBER``, or a text with NUL or half a surrogate
            pair.
        ValueError: the text is not JSON.
    """
    bad: list[_BadNumber] = []

    def number(convert: Callable[[str], Any], text: str) -> Any:
        problem = _problem_of(text)
        if problem is None:
            return convert(text)
        bad.append(_BadNumber(problem))
        return bad[-1]

    as_float, as_integer = functools.partial(number, float), functools.partial(number, int)
    value = json.loads(
        text, object_pairs_hook=_no_duplicates, parse_float=as_float, parse_int=as_integer, parse_constant=as_float
    )
    if bad:  # only now is its key known
        raise UserError(": ".join(filter(None, (".".join(_path_to(bad[0], value)), bad[0].problem))))
    _check_texts(value, "")
    return value


def _check_texts(value: Any, where: str) -> None:
    """Raises UserError for a key or a text that neither a file system nor UTF-8 can hold."""
    if isinstance(value, str) and _IN_NO_NAME.search(value):
        problem = f"{_shortened(repr(value))} holds a character that no file name and no UTF-8 can hold"
        raise UserError(": ".join(filter(None, (where, problem))))
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        _check_texts(key, where)
        _check_texts(entry, _dotted(where, str(key)))


def check_keys(section: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raises UserError for all keys of ``section`` outside of ``valid``."""
    valid = set(valid)
    unknown = [key for key in section if key not in valid]
    if unknown:
        raise UserError(list_unknown(unknown, valid, where))


def describe(error: pydantic.ValidationError, model: type[BaseModel] | None, where: str) -> str:
    """Describes the first problem of a pydantic error in one line: the key, the expected values, the value.

    Args:
        error: the pydantic error.
        model: the validated model; its field names give the hint for an unknown key.
        where: dotted key of the validated value in its file.
    """
    problems = error.errors(include_url=False)
    problem = problems[0]
    if problem["type"] == "missing":  # a required key may be there under a misspelt name
        misspelt = (each for each in problems if each["type"] == "extra_forbidden" and _is_beside(each, problem))
        problem = next(misspelt, problem)
    is_unknown_key = problem["type"] == "extra_forbidden"
    # For a union, pydantic adds the tried member to the location. Such parts are left out of the key, but the last part
    # of an unknown key is always kept: a user's key may be named like a union member.
    last = len(problem["loc"]) - 1
    parts = enumerate(problem["loc"])
    path = [str(part) for index, part in parts if not _is_union_member(part) or (is_unknown_key and index == last)]
    name = _dotted(where, *path)
    if is_unknown_key and model is not None:
        others = (each for each in problems if each["type"] == problem["type"] and _is_beside(each, problem))
        unknown = [str(each["loc"][-1]) for each in others]
        return list_unknown(unknown, _fields_at(model, path[:-1]), _dotted(where, *path[:-1]))
    if problem["type"] == "missing":
        return f"{name}: missing"
    if problem["type"] in ("value_error", "assertion_error"):  # a model validator: its message names the fields
        said = str(problem["ctx"]["error"])
    else:
        said = f"{problem['msg'][0].lower()}{problem['msg'][1:]}, found {_shortened(repr(problem['input']))}"
    return f"{name}: {said}" if name else said  # the whole file has no name


def _is_union_member(part: int | str) -> bool:
    return part in _UNION_MEMBERS or "[" in str(part)  # such as "list[int]"


def _is_beside(problem: ErrorDetails, other: ErrorDetails) -> bool:
    """Whether both are of keys of one section."""
    return problem["loc"][:-1] == other["loc"][:-1]


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Returns the field names of the model at ``path``, or of the last model along it."""
    for part in path:
        if part.isdigit():  # an index of a list; the list's field selected the model already
            continue
        field = model.model_fields.get(part)
        annotations = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
        models = [each for each in annotations if isinstance(each, type) and issubclass(each, BaseModel)]
        if not models:
            break
        model = models[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)


@dataclass(frozen=True, eq=False)
class _BadNumber:
    """A placeholder for an unusable number, until its key is known."""

    problem: str


def _problem_of(text: str) -> str | None:
    """Why a JSON number cannot be used; None if it can.

    The check converts to float first, because longer integers are slow to convert and Python refuses thousands of
    digits.
    """
    value = float(text)
    shown = _shortened(text)
    if not math.isfinite(value):
        return f"{shown} is not a finite number"
    if abs(value) > MAX_NUMBER:
        return f"{shown} is larger than any number of a run; expected at most {MAX_NUMBER:g}"
    return None


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _path_to(part: object, value: Any) -> list[str]:
    """The keys to ``part`` in a JSON value; empty if it is the value itself, or if a later key replaced it."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        if entry is part:
            return [str(key)]
        if inner := _path_to(part, entry):
            return [str(key), *inner]
    return []


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        repeated = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise UserError(f'the key "{repeated}" is given twice')
    return document


def list_unknown(keys: Sequence[str], valid: Iterable[str], where: str) -> str:
    """The message about unknown keys of a section: a hint for the first, and the names of some others."""
    first, *others = (_shortened(key) for key in keys[:_LISTED_KEYS])
    message = f"{_dotted(where, first)}: unknown key{nearest(first, valid)}"
    if others:
        message += f"; also unknown: {', '.join(others)}"
    if len(keys) > _LISTED_KEYS:
        message += f" and {len(keys) - _LISTED_KEYS:,} more"
    return message


def _apply_override(document: dict[str, Any], override: str) -> None:
    """Sets one value of the document in place; missing sections are created."""
    key, separator, text = override.partition("=")
    shown = _shortened(override)
    if not separator or not key:
        raise UserError(f"--set {shown}: expected KEY.PATH=VALUE, for example m6.model.num_layers=4")
    try:
        value = parse_json(text)
    except UserError as error:
        raise UserError(f"--set {shown}: {error}") from None
    except (ValueError, RecursionError):
        value = text  # not JSON: a plain string, so names and paths need no quotes
    *parents, last = key.split(".")
    if not all((*parents, last)):
        raise UserError(f"--set {shown}: an empty name in {key}")
    node: Any = document
    above = ""
    for name in parents:
        place = _place(node, name, above, shown)
        node = node.setdefault(place, {}) if isinstance(node, dict) else node[place]
        above = name
    node[_place(node, last, above, shown)] = value


def _place(node: Any, name: str, above: str, shown: str) -> Any:
    """Converts a name of a path to an index into a node: a key of a section, or a position in a list."""
    if isinstance(node, dict):
        return name
    if not isinstance(node, list):
        raise UserError(f"--set {shown}: {above} is not a section")
    if not name.isdecimal() or int(name) >= len(node):
        raise UserError(f"--set {shown}: {above} is a list of {len(node)}, expected a number below that after it")
    return int(name)
