"""The configuration of fine-tuning, with the model of a run or of an export; needs no torch."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from m6.architecture.settings import MODEL_TYPE, ModelSettings
from m6.config.run import RunConfig, load_config, parse_document
from m6.errors import UserError
from m6.files import parse_object
from m6.shipped import shipped_file
from m6.validation import read_document


def load_finetuning_config(
    path: Path, init: Path, overrides: tuple[str, ...] = (), *, from_scratch: bool = False
) -> RunConfig:
    """Reads a run's JSON and takes the model's configuration from ``init``.

    Values of m6.model and m6.moe in the JSON, such as a dropout rate, override those of ``init``. The returned
    configuration is complete and no longer depends on ``init``.

    Args:
        path: the JSON file, or the name of a shipped one.
        init: the folder of a run, or a folder written by ``m6 export``.
        overrides: see ``load_config``.
        from_scratch: whether the run begins with random weights, and takes nothing else from ``init``.

    Raises:
        UserError: as in ``load_config``; or ``init`` is neither a run nor an exported model.
    """
    path = shipped_file(path, "configuration")
    document = read_document(path, overrides)
    section = document.get("m6")
    if isinstance(section, dict):
        if not from_scratch:
            section["init"] = str(init)
        for name, inherited in _model_sections(init).items():
            own = section.get(name, {})
            if isinstance(own, dict):  # its values override those of ``init``; another type is refused below
                section[name] = {**inherited, **own}
            elif own is None:
                raise UserError(f"{path}: m6.{name} is null, but {init} has one; leave the key out")
    return parse_document(path, document)


def _model_sections(init: Path) -> dict[str, dict[str, Any]]:
    """The section "model" and, if the model is sparse, the section "moe" of a run or of an exported model."""
    if is_exported(init):
        document = json.loads((init / "config.json").read_text(encoding="utf-8"))
        names = {field.name for field in fields(ModelSettings)}
        sections = {
            "model": {key: document[key] for key in names - {"moe"} if key in document},
            "moe": document.get("moe"),
        }
    else:
        document = load_config(init / "config.json").document["m6"]
        sections = {name: document.get(name) for name in ("model", "moe")}
    for name, section in sections.items():
        if not isinstance(section, dict | None):
            raise UserError(f"{init / 'config.json'}: {name} is {section!r:.80}, expected an object")
    return {name: section for name, section in sections.items() if section is not None}


def is_exported(folder: Path) -> bool:
    """Whether the folder holds an exported model (True) or a run (False); UserError if neither."""
    file = folder / "config.json"
    try:
        content = parse_object(file.read_bytes())
    except (OSError, ValueError):
        raise UserError(f"{folder}: neither a run nor an exported model (no readable config.json)") from None
    if not ("m6" in content or content.get("model_type") == MODEL_TYPE):
        raise UserError(f"{file}: belongs neither to a run nor to an exported model")
    return "m6" not in content
