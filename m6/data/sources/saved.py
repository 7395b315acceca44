"""The folder that ``save_to_disk`` of Hugging Face Datasets writes: which Arrow files hold which split.

    SAVED/dataset_dict.json               {"splits": ["train", "test"]}; without it, SAVED is one data set
    SAVED/train/state.json                {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    SAVED/train/data-00000-of-00001.arrow

Only these names are read here: the format in which its user saw the rows (``with_format``) does not matter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from m6.data.sources.local import unreadable_reason
from m6.errors import UserError
from m6.files import reading

DICT_NAME, STATE_NAME = "dataset_dict.json", "state.json"
_MAX_JSON_BYTES = 64 << 20


def is_saved(folder: Path) -> bool:
    """Whether a folder is one of a saved data set."""
    return any((folder / name).is_file() for name in (STATE_NAME, DICT_NAME))


def arrow_files(folder: Path) -> dict[str, list[Path]]:
    """Returns the Arrow files of each split in order; of a data set without splits under the name "".

    Raises:
        UserError: a file is missing, damaged or not in the folder of its split, or a split is not in the folder.
    """
    if (folder / STATE_NAME).is_file():
        return {"": _files_of(folder, folder)}
    file = folder / DICT_NAME
    splits = _object(folder, file).get("splits")
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise UserError(f'{file}: expected "splits" with a list of names')
    for split in splits:
        if problem := unreadable_reason(folder, folder / split / STATE_NAME):
            raise UserError(f"{file} names the split {split!r}, whose {STATE_NAME} is not read ({problem})")
    return {split: _files_of(folder, folder / split) for split in splits}


def _files_of(root: Path, folder: Path) -> list[Path]:
    file = folder / STATE_NAME
    state = _object(root, file)
    if state.get("_indices_data_files"):  # of datasets before 2.0
        raise UserError(f"{file} names a selection of rows, which is not read; save the rows by flatten_indices()")
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise UserError(f'{file}: expected "_data_files" with a list of objects')
    for each in listed:
        name = each.get("filename")
        if not isinstance(name, str):
            raise UserError(f'{file}: expected "filename" with a name in each of "_data_files"')
        # A file of another split is none of this one, though both are in the root.
        if problem := unreadable_reason(root, folder / name) or unreadable_reason(folder, folder / name):
            raise UserError(f"{file} names {name!r}, which is not read ({problem})")
    return [folder / each["filename"] for each in listed]


def _object(folder: Path, file: Path) -> dict[str, Any]:
    if problem := unreadable_reason(folder, file):
        raise UserError(f"{file} is not read ({problem})")
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise UserError(f"{file} is larger than {_MAX_JSON_BYTES >> 20} MiB")
    try:
        with reading(file):
            value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):  # of storage
            raise
        raise UserError(f"{file} is not valid JSON") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected an object")
    return value
