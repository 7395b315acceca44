"""Which files of an input are read: their suffixes decide."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePath

from m6.data.corpus.recipe import InputSettings, NamedSet
from m6.data.sources.local import PICTURE_SUFFIXES, unreadable_reason
from m6.errors import UserError

TABLES = (".jsonl", ".jsonl.gz", ".parquet")
ARCHIVES = (".warc", ".warc.gz", ".wet", ".wet.gz")
TEXTS = (".txt", ".md")
TARS = (".tar",)
DOCUMENTS = (*TABLES, *ARCHIVES, *TEXTS)
FORMS = (*DOCUMENTS, *TARS)
_LISTED_SUFFIXES = 5  # in a note; others, as of log.1 and log.2, may be as many as files


def suffix_of(path: PurePath, suffixes: tuple[str, ...] = FORMS) -> str | None:
    """Returns the form of a file that can be read; None for another file."""
    return next((suffix for suffix in suffixes if path.name.lower().endswith(suffix)), None)


def below(path: Path) -> list[Path]:
    """Returns a file, or all files below a folder in order."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if not file.is_dir())


def files_of(path: Path, suffixes: tuple[str, ...] = DOCUMENTS) -> list[Path]:
    """Returns a file or the files below a folder that have a suffix, in order; empty if there are none."""
    return [file for file in below(path) if suffix_of(file, suffixes) is not None]


def files_of_set(named: NamedSet) -> list[Path]:
    """Returns the files of a named set of texts in order; UserError if there are none, or one is not to be read."""
    if not (found := files_of(named.path)):
        raise UserError(f"decontamination.sets: {named.path}: expected files {', '.join(DOCUMENTS)}")
    check_readable("decontamination.sets", named.path, found)
    return found


def check_readable(key: str, path: Path, found: Iterable[Path]) -> None:
    """Raises UserError for a file of a named set that is not read: what it holds would not be kept out of the corpus.

    Args:
        key: of the recipe.
        path: the set's file or folder.
        found: its files.
    """
    folder = path.parent if path.is_file() else path
    for file in found:
        if problem := unreadable_reason(folder, file):
            raise UserError(f"{key}: {file} is not read ({problem}); remove it, or name what it points to as a set")


def choose_files(settings: InputSettings, names: Iterable[PurePath]) -> list[PurePath]:
    """Returns the files of an input that are read, in order; a note on stderr counts the others.

    Texts beside files of other forms, such as a README, are no documents, as for ``m6 data build``.
    """
    forms = {name: suffix_of(name) for name in names}
    data = {name: form for name, form in forms.items() if form is not None and form not in TEXTS}
    read = data or {name: form for name, form in forms.items() if form is not None}
    # Rows of tables may name pictures by their path.
    named = PICTURE_SUFFIXES if settings.image_column is not None else frozenset()
    unread = [name for name in forms if name not in read and name.suffix.lower() not in named]
    if read and unread:
        suffixes = Counter(name.suffix.lower() or "without a suffix" for name in unread)
        counts = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(_LISTED_SUFFIXES))
        print(
            f'note: "{settings.called}" is read from {" and ".join(sorted(set(read.values())))} files; '
            f"{len(unread)} others are not read, such as {unread[0]} ({counts})",
            file=sys.stderr,
        )
    return list(read)
