"""Decides how a file or a folder of the user's own data is read, and says what of it is not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from m6.data.sources.base import Source, SourceOptions
from m6.data.sources.documents import Documents
from m6.data.sources.folders import METADATA, PictureFolder
from m6.data.sources.local import PICTURE_SUFFIXES, unreadable_reason
from m6.data.sources.tables import LocalTable, SavedDataset
from m6.data.sources.webdataset import WebDataset
from m6.errors import UserError

_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk of Hugging Face Datasets writes


def open_path(name: str, path: Path, options: SourceOptions) -> Source:
    """Returns the source of a file or a folder; what it does not read of a folder is printed to stderr.

    Args:
        name: name in the manifest.
        path: an existing file or folder.
        options: columns and licence.

    Raises:
        UserError: there is nothing that can be read, a file is a link out of the folder, or a column is missing.
    """
    if path.is_file():
        forms = {_form(path): [path]}
        if not forms.keys() & {".tar", *LocalTable.FORMATS, *Documents.FORMATS}:
            known = ", ".join((".tar", *LocalTable.FORMATS, *Documents.FORMATS))
            raise UserError(f"{path}: expected a folder or a file {known}")
        return _source(name, path.parent, forms, options)[0]
    if any((path / file).is_file() for file in _SAVED):
        _refuse_links(path, sorted(path.rglob("*.arrow")))
        return SavedDataset(name, path, options)
    forms = {}
    for file in sorted(path.rglob("*")):
        if file.is_symlink() or not file.is_dir():
            forms.setdefault(_form(file), []).append(file)
    source, used = _source(name, path, forms, options)
    unused = {form: files for form, files in forms.items() if form not in used}
    for form, files in unused.items():
        print(
            f'note: "{name}" is read from {" and ".join(_title(form) for form in used if form in forms)}; '
            f"{len(files)} {_title(form)} are not read, such as {files[0].relative_to(path)}",
            file=sys.stderr,
        )
    return source


def _source(
    name: str, folder: Path, forms: Mapping[str, list[Path]], options: SourceOptions
) -> tuple[Source, tuple[str, ...]]:
    """Returns the source of some forms of files, and the forms that it reads; others than these are ignored."""
    tables = [form for form in LocalTable.FORMATS if form in forms]
    if "metadata" in forms or ("pictures" in forms and ".tar" not in forms and not tables):
        # Files of other forms, such as a licence, are no data of such a folder.
        return PictureFolder(name, folder, options), ("pictures", "metadata", ".txt", "other")
    if ".tar" in forms:
        _refuse_links(folder, forms[".tar"])
        return WebDataset(name, folder, forms[".tar"], options), (".tar", "other")
    if tables:
        files = [file for form in tables for file in forms[form]]
        _refuse_links(folder, files)
        table = LocalTable(name, folder, files, options)
        # Rows may name pictures by their path.
        return table, (*tables, "other", *(("pictures",) if table.kind in ("image_text", "vqa") else ()))
    documents = [file for form in Documents.FORMATS for file in forms.get(form, ())]
    if documents:
        _refuse_links(folder, documents)
        return Documents(name, folder, sorted(documents), options), (*Documents.FORMATS, "other")
    return PictureFolder(name, folder, options), ()  # raises: the message lists what can be read


def _form(file: Path) -> str:
    suffix = file.suffix.lower()
    if file.name in METADATA:
        return "metadata"
    if suffix in PICTURE_SUFFIXES:
        return "pictures"
    return suffix if suffix in (".tar", *LocalTable.FORMATS, *Documents.FORMATS) else "other"


def _title(form: str) -> str:
    return f"{form} files" if form.startswith(".") else form


def _refuse_links(folder: Path, files: list[Path]) -> None:
    """Raises UserError for a link out of the folder or a pipe or device."""
    for file in files:
        if problem := unreadable_reason(folder, file):
            raise UserError(f"{file} is not read ({problem}); remove it, or name what it points to as a source")
