"""Keys with a new name: the old one still works, with a warning, until version 0.2."""

from __future__ import annotations

from typing import Any

from m6.errors import UserError

RENAMED = {
    "m6.training.micro_batches_at_once": "m6.training.overlap_micro_batches",
    "m6.moe.payload": "m6.moe.dispatch_dtype",
}
"""Old key -> new key, in the same section."""
_NEW_NAMES = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in RENAMED.items()}
_NAMED_BY = "m6.elastic.may_change"
"""A list with names of keys."""


def with_new_keys(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a run's JSON with new keys only, and a warning for each old one. The argument is not changed.

    Raises:
        UserError: a section has both names of a key.
    """
    warnings = []
    for old, new in RENAMED.items():
        *path, last = old.split(".")
        section = _section(document, path)
        if section is None or last not in section:
            continue
        name = new.rpartition(".")[2]
        if name in section:
            raise UserError(f"{old} and {new} are two names of one key; leave {old} out")
        document = _replaced(document, path, {(name if key == last else key): value for key, value in section.items()})
        warnings.append(f"{old} is now {new}; the old name works until version 0.2")
    return _with_elastic_names(document, warnings), warnings


def with_new_moe_keys(moe: dict[str, Any]) -> dict[str, Any]:
    """Returns the section ``m6.moe`` of an export with new keys only."""
    found, _ = with_new_keys({"m6": {"moe": moe}})
    section: dict[str, Any] = found["m6"]["moe"]
    return section


def with_new_names(record: Any) -> Any:
    """Returns a record whose keys are last parts of names, such as a layout in RUN/plan.json, with new keys only."""
    return {_NEW_NAMES.get(key, key): value for key, value in record.items()} if isinstance(record, dict) else record


def _with_elastic_names(document: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    *path, last = _NAMED_BY.split(".")
    section = _section(document, path)
    names = None if section is None else section.get(last)
    if section is None or not isinstance(names, list):
        return document
    for name in names:
        if name in _NEW_NAMES:
            warnings.append(f'{_NAMED_BY}: "{name}" is now "{_NEW_NAMES[name]}"; the old name works until version 0.2')
    changed = [_NEW_NAMES.get(name, name) if isinstance(name, str) else name for name in names]
    return _replaced(document, path, {**section, last: changed})


def _section(document: Any, path: list[str]) -> dict[str, Any] | None:
    for part in path:
        document = document.get(part) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else None


def _replaced(document: dict[str, Any], path: list[str], section: dict[str, Any]) -> dict[str, Any]:
    if not path:
        return section
    first, *rest = path
    return {**document, first: _replaced(document[first], rest, section)}
