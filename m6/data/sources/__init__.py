"""Sources of rows: built-in sources, fetched from public packages, and the user's own data."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from m6.data.sources.base import Row, Source, SourceOptions
from m6.data.sources.chinese_texts import Inews, InewsSentiment, Poetry, Reviews
from m6.data.sources.drawings import Emoji, EmojiStyles, IconPark, TuxPaint
from m6.data.sources.folders import METADATA, PictureFolder, captions_of
from m6.data.sources.local import (
    PICTURE_SUFFIXES,
    LocalSource,
    is_apple_double,
    is_hidden,
    note_hidden,
    unreadable_reason,
)
from m6.data.sources.rows import DICT_NAME, STATE_NAME, Documents, is_saved
from m6.data.sources.shapes import EasyVqaCaptions, EasyVqaQuestions, Shapes
from m6.data.sources.tables import HubTable, LocalTable, SavedDataset
from m6.data.sources.webdataset import WebDataset
from m6.errors import UserError, nearest

__all__ = ["BUILT_IN", "Row", "Source", "SourceOptions", "find_source", "find_sources"]

# Classes, not instances: a source reads its package when it is made.
BUILT_IN: dict[str, Callable[[SourceOptions], Source]] = {
    source.name: source
    for source in (
        Inews,
        InewsSentiment,
        EasyVqaCaptions,
        EasyVqaQuestions,
        Emoji,
        EmojiStyles,
        IconPark,
        Poetry,
        Reviews,
        Shapes,
        TuxPaint,
    )
}


def find_sources(specifiers: Sequence[str], options: SourceOptions) -> list[Source]:
    """Returns the sources named by the arguments of a command.

    Raises:
        UserError: as ``find_source``; no source reads a column named by an option; a licence is for an unknown source;
            or a context or question column is given without a label column.
    """
    if options.context_column is not None and options.label_column is None:
        raise UserError(
            f"--context-column {options.context_column}: a context belongs to a labelled text; "
            "name the column of labels by --label-column"
        )
    if options.question_column is not None and options.label_column is None:
        raise UserError(
            f"--question-column {options.question_column}: name the column of the answers by --label-column"
        )
    if options.question_column is not None and options.text_column != SourceOptions.text_column:
        raise UserError(
            f"--text-column {options.text_column}: with --question-column no captions are read; leave one of them out"
        )
    sources = [find_source(specifier, options) for specifier in specifiers]
    own = [source for source in sources if isinstance(source, LocalSource | HubTable)]
    names = [source.name for source in own]
    for name in options.licences:
        if name not in names:
            raise UserError(f'a licence for "{name}", which is not among the sources of your own{nearest(name, names)}')
    read = {role for source in own for role in source.columns}
    for role, column in options.columns().items():
        if role not in read and (role, column) != ("text", SourceOptions.text_column):
            reasons = [
                f'"{source.name}" has {"no such column" if getattr(source, "columns", ()) else "no columns"}'
                for source in sources
            ]
            raise UserError(
                f"--{role}-column {column}: {', '.join(reasons)}; columns are read from tables, metadata.jsonl, "
                "metadata.csv and the .json of WebDataset"
            )
    return sources


def find_source(specifier: str, options: SourceOptions) -> Source:
    """Returns the source named by a command-line argument.

    Args:
        specifier: a built-in name, a path, or ``hf:NAME[:SPLIT]``. A prefix ``CALLED=`` before a path or ``hf:`` sets
            the name in the manifest; the default is the last part of the path.
        options: columns, licence and cache folder.

    Raises:
        UserError: there is no such source, file or folder.
    """
    if specifier in BUILT_IN:
        return BUILT_IN[specifier](options)
    name, location = re.fullmatch(r"(?:(\w[\w-]*)=)?(.*)", specifier, re.DOTALL).groups()  # type: ignore[union-attr]
    if location.startswith("hf:"):
        dataset, _, split = location.removeprefix("hf:").partition(":")
        return HubTable(name or _name(dataset), dataset, split or None, options)
    if location in ("", "."):
        raise UserError(f'"{specifier}" names no source: give the file or the folder by its path')
    path = Path(location)
    if not path.exists():
        called = f' (source "{name}")' if name else ""
        if "/" in location:
            raise UserError(f"{location}: no such file or folder{called}")
        hint = nearest(location, BUILT_IN)
        raise UserError(f'there is no source and no file or folder "{location}"{called}{hint}')
    return open_path(name or _name(path.resolve().name), path, options)


def _name(text: str) -> str:
    """Returns a name safe in file names: the last part of a path up to its first dot."""
    return re.sub(r"[^\w-]", "_", text.rsplit("/", 1)[-1].split(".")[0]) or "own"


_FORMATS = (".tar", *LocalTable.FORMATS, *Documents.FORMATS)
_READ_FORMS = (*_FORMATS, ".arrow", "pictures", "metadata")
_OTHERS = "files of other forms"
# Descriptions of ignored files of a form with a reader.
_LEFT_OVER = {
    ".txt": " without a picture",
    "pictures": " that no row names",
    ".arrow": " that no state.json names",
}
_LISTED_FORMS = 8  # other forms in a note
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_NO_DATA = re.compile(
    r"(licen[cs]e|copying|notice|readme|changelog|citation|authors|(md5|sha\d+)sums?|checksums?)([-.]\w+)?"
    r"|.+\.(md5|sha\d+|sig|asc)|thumbs\.db|desktop\.ini|_success|cache-\w+\.arrow",
    re.IGNORECASE,
)


def open_path(name: str, path: Path, options: SourceOptions) -> Source:
    """Returns the source of a file or a folder. Ignored files of a folder are reported on stderr.

    Args:
        name: name in the manifest.
        path: an existing file or folder.
        options: columns and licence.

    Raises:
        UserError: there is no readable file, a file is a link out of the folder, or a column is missing.
    """
    if path.is_file():
        forms = {_form(path): [path]}
        if forms.keys().isdisjoint(_FORMATS):
            raise UserError(f"{path}: expected a folder or a file {', '.join(_FORMATS)}")
        return _source(name, path.parent, forms, options)[0]
    forms, hidden = {}, []
    for file in sorted(path.rglob("*")):
        if file.is_dir() and not file.is_symlink():
            continue
        if not is_hidden(relative := file.relative_to(path)):
            forms.setdefault(_form(file), []).append(file)
        elif _form(file) in _READ_FORMS and not is_apple_double(relative):
            hidden.append(relative)
    note_hidden(name, hidden)
    if is_saved(path):
        saved = SavedDataset(name, path, options)
        described = [file for file in forms[".json"] if file.name in (DICT_NAME, STATE_NAME, "dataset_info.json")]
        _note_unread(name, path, forms, {".arrow": saved.files, ".json": described})
        return saved
    source, read = _source(name, path, forms, options)
    _note_unread(name, path, forms, read)
    return source


def _source(
    name: str, folder: Path, forms: Mapping[str, list[Path]], options: SourceOptions
) -> tuple[Source, Mapping[str, list[Path]]]:
    """Returns the source of some files given by form, and the files read by it, by form."""

    def of(*names: str) -> dict[str, list[Path]]:
        return {form: forms[form] for form in names if form in forms}

    tables = of(*LocalTable.FORMATS)
    if "metadata" in forms or ("pictures" in forms and ".tar" not in forms and not tables):
        _refuse_links(folder, forms.get("metadata", []))
        read = of("pictures", "metadata")
        if "metadata" not in forms:
            beside = captions_of(forms["pictures"], forms.get(".txt", ()))
            if captions := [file for files in beside.values() for file in files]:
                read[".txt"] = captions
        return PictureFolder(name, folder, options), read
    if ".tar" in forms:
        _refuse_links(folder, forms[".tar"])
        return WebDataset(name, folder, forms[".tar"], options), of(".tar")
    if tables:
        files = [file for each in tables.values() for file in each]
        _refuse_links(folder, files)
        table = LocalTable(name, folder, files, options)
        # Rows may refer to image files by path.
        return table, tables | ({"pictures": table.picture_files} if "pictures" in forms else {})
    if documents := of(*Documents.FORMATS):
        files = sorted(file for each in documents.values() for file in each)
        _refuse_links(folder, files)
        return Documents(name, folder, files, options), documents
    return PictureFolder(name, folder, options), {}  # raises: the message lists readable forms


def _form(file: Path) -> str:
    suffix = file.suffix.lower()
    if file.name in METADATA:
        return "metadata"
    if suffix in PICTURE_SUFFIXES:
        return "pictures"
    inner = Path(file.stem).suffix.lower()  # .jsonl.gz is another form than .jsonl, and than other .gz
    return inner + suffix if suffix in _COMPRESSED and inner in _FORMATS else suffix or "without a suffix"


def _note_unread(name: str, folder: Path, forms: Mapping[str, list[Path]], read: Mapping[str, list[Path]]) -> None:
    """Prints the ignored files of a folder, except names without data such as README."""
    files_read = {file for files in read.values() for file in files}
    titles = {form: f"{form} files" if form.startswith(".") else form for form in _READ_FORMS}
    unread: dict[str, list[Path]] = {}
    others: Counter[str] = Counter()
    for form, files in forms.items():
        left = [file for file in files if file not in files_read and _NO_DATA.fullmatch(file.name) is None]
        if left and form not in titles:
            others[form] = len(left)
        title = titles.get(form, _OTHERS) + (_LEFT_OVER.get(form, "") if form in read else "")
        unread.setdefault(title, []).extend(left)
    listed = ", ".join(f"{count} {form}" for form, count in others.most_common(_LISTED_FORMS))
    for title, files in unread.items():
        if files:
            print(
                f'note: "{name}" is read from {" and ".join(titles[form] for form in read if form in titles)}; '
                f"{len(files)} {title} are not read, such as {files[0].relative_to(folder)}"
                + (f" ({listed})" if title == _OTHERS else ""),
                file=sys.stderr,
            )


def _refuse_links(folder: Path, files: list[Path]) -> None:
    """Raises UserError for a link out of the folder or a pipe or device."""
    for file in files:
        if problem := unreadable_reason(folder, file):
            raise UserError(f"{file} is not read ({problem}); remove it, or name what it points to as a source")
