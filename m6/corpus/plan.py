"""The plan of a corpus: its inputs cut into parts, with checksums. It is fixed while the corpus is built.

A part is a table file, a tar file, some hundred text files, a whole built-in source, or a whole folder of images. Each
task does some of the parts. The output depends only on the parts, not on the number of tasks. A file's suffix decides
whether it is read.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from m6 import files
from m6.corpus.inputs import Checksums, InputFile, is_remote, list_remote
from m6.corpus.recipe import CorpusRecipe, InputSettings, NamedPictures, NamedSet
from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources import BUILT_IN, Source, SourceOptions, find_source
from m6.data.sources.folders import METADATA
from m6.data.sources.local import (
    PICTURE_SUFFIXES,
    is_apple_double,
    is_hidden,
    split_folders,
    split_of_folder,
    splits_of_files,
    unreadable_reason,
)
from m6.data.sources.packages import combined_sha256
from m6.errors import UserError
from m6.validation import describe

TABLES = (".jsonl", ".jsonl.gz", ".parquet")
ARCHIVES = (".warc", ".warc.gz", ".wet", ".wet.gz")
TEXTS = (".txt", ".md")
TARS = (".tar",)
DOCUMENTS = (*TABLES, *ARCHIVES, *TEXTS)
FORMS = (*DOCUMENTS, *TARS)
_LISTED_SUFFIXES = 5  # in a note; there may be as many suffixes as files, such as log.1 and log.2


def suffix_of(path: PurePath, suffixes: tuple[str, ...] = FORMS) -> str | None:
    """Returns the suffix of a readable form; None for any other file."""
    return next((suffix for suffix in suffixes if path.name.lower().endswith(suffix)), None)


def below(path: Path) -> list[Path]:
    """Returns a file, or all files below a folder, sorted."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if not file.is_dir())


def files_of(path: Path, suffixes: tuple[str, ...] = DOCUMENTS) -> list[Path]:
    """Returns the files with one of these suffixes, sorted: the path itself, or below it. May be empty."""
    found = [file for file in below(path) if suffix_of(file, suffixes) is not None]
    return found if path.is_file() else [file for file in found if not is_apple_double(file.relative_to(path))]


def files_of_set(named: NamedSet) -> list[Path]:
    """Returns the sorted files of a named set of texts; UserError if there are none or one is unreadable."""
    if not (found := files_of(named.path)):
        raise UserError(f"decontamination.sets: {named.path}: expected files {', '.join(DOCUMENTS)}")
    check_readable("decontamination.sets", named.path, found)
    return found


def check_readable(key: str, path: Path, found: Iterable[Path]) -> None:
    """Raises UserError if a file of a named set is unreadable: its contents could not be kept out of the corpus.

    Args:
        key: key of the recipe, for the message.
        path: the set's file or folder.
        found: files of the set.
    """
    folder = path.parent if path.is_file() else path
    for file in found:
        if problem := unreadable_reason(folder, file):
            raise UserError(f"{key}: {file} is not read ({problem}); remove it, or name what it points to as a set")


def choose_files(settings: InputSettings, names: Iterable[PurePath]) -> list[PurePath]:
    """Returns the readable files of an input in their order. A note on stderr counts the others.

    If there are files of other forms, text files such as a README are not documents, as in ``m6 data build``. Hidden
    files are not read.
    """
    forms = {name: None if is_hidden(name) else suffix_of(name) for name in names}
    data = {name: form for name, form in forms.items() if form is not None and form not in TEXTS}
    read = data or {name: form for name, form in forms.items() if form is not None}
    # Rows of tables may refer to image files by path, so these are not reported as unread.
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


_SETS = (".parquet", *TARS, *sorted(PICTURE_SUFFIXES))  # forms of a named set of images
_FILES_OF_A_PART = 500  # of texts, or of images of a set
PLAN_NAME = "plan.json"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Part(_Entry):
    """The unit of reading: one task reads a part at a time.

    Attributes:
        input: name of the input.
        files: indices into the plan's files; empty if the part is a whole source without files.
        unreadable: why the files are not opened, if so.
    """

    input: str
    files: list[int] = []
    unreadable: str | None = None


class PlannedInput(_Entry):
    """An input's entry in the manifest."""

    kind: SourceKind = "text"
    own_splits: list[Split] = []
    origin: list[Origin]


class Plan(_Entry):
    """The parts of all inputs in order, followed by the parts of the named sets of images.

    Attributes:
        scorer: checksum of the model for image-text matching.
        checksums: combined checksum of the files of each named set, by name.
    """

    format: Literal[1] = 1
    recipe: dict[str, Any]
    scorer: str | None = None
    inputs: dict[str, PlannedInput]
    sets: list[str] = []
    checksums: dict[Literal["sets", "picture_sets"], dict[str, str]] = {}
    files: list[InputFile]
    parts: list[Part]

    def files_of(self, part: Part) -> list[InputFile]:
        """Returns the files of a part."""
        return [self.files[number] for number in part.files]

    def check_set(self, named: NamedSet) -> None:
        """Checks the files of a named set against the plan.

        Raises:
            UserError: a file has changed, is new or is gone.
            StorageError: the file system does not answer.
        """
        planned = {file.path: file for file in self.files}
        paths = [str(path) for path in files_of(named.path)]
        found = [planned[path] for path in paths if path in planned]
        if len(found) < len(paths) or _combined(named.path, found) != self.checksums["sets"][named.name]:
            raise UserError(f"{named.path} has changed since the corpus was begun")
        for file in found:
            file.check_unchanged()

    def kind(self, part: Part) -> SourceKind:
        """Returns the kind of a part's rows."""
        return "image_text" if part.input in self.sets else self.inputs[part.input].kind

    def kinds(self) -> set[SourceKind]:
        """Returns the kinds of rows in all parts."""
        return {self.kind(part) for part in self.parts}

    def manifest_recipe(self) -> dict[str, Any]:
        """Returns the manifest's entry of the recipe, with checksums of the named sets and the scorer."""
        others = {"scorer": self.scorer, "checksums": self.checksums}
        return {"corpus": self.recipe} | {name: value for name, value in others.items() if value}

    def contents(self) -> dict[str, Any]:
        """Returns the plan without file times. Equal contents give the same corpus."""
        return self.model_dump(exclude={"files": {"__all__": {"modified_ns"}}})


def load_plan(file: Path) -> Plan:
    """Reads a plan; UserError if the file is not a plan."""
    try:
        return Plan.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(f"{file} is not the plan of a corpus: {describe(error, Plan, '')}") from None


def make_plan(recipe: CorpusRecipe, checksums: Checksums | None = None) -> Plan:
    """Lists the inputs of a recipe and computes their checksums.

    Args:
        recipe: the recipe.
        checksums: computes checksums of local files and may know some; None: all files are read.

    Raises:
        UserError: an input does not exist, has no licence, or has no readable file.
    """
    plan = Plan(recipe=recipe.identity(), inputs={}, files=[], parts=[])
    checksums = checksums or Checksums()
    # First, since checksums may take hours and a missing set should fail at once.
    sets = [files_of_set(named) for named in recipe.decontamination.sets]
    picture_sets = [_files_of_pictures(named) for named in recipe.decontamination.picture_sets]
    for settings in recipe.inputs:
        path = Path(settings.source)
        is_own = settings.source not in BUILT_IN and not settings.source.startswith("hf:") and path.exists()
        if is_remote(settings.source):
            _add_files(plan, settings, _remote_files(settings))
        elif not is_own or _is_picture_folder(path):
            source = open_source(settings, recipe)
            if source.kind not in ("text", "image_text"):
                raise UserError(
                    f'"{settings.called}" has rows of kind {source.kind}; a corpus is made of texts, and of pictures '
                    "with captions"
                )
            own = sorted(source.own_splits)
            plan.inputs[settings.called] = PlannedInput(kind=source.kind, own_splits=own, origin=source.origin())
            plan.parts.append(Part(input=settings.called))
        else:
            _add_files(plan, settings, _local_files(settings, path, checksums))
    for named, found in zip(recipe.decontamination.sets, sets, strict=True):
        entries = checksums.entries(found)
        plan.files += entries
        plan.checksums.setdefault("sets", {})[named.name] = _combined(named.path, entries)
    for pictures, found in zip(recipe.decontamination.picture_sets, picture_sets, strict=True):
        _add_set(plan, pictures, found, checksums.entries(found))
    return plan


def open_source(settings: InputSettings, recipe: CorpusRecipe) -> Source:
    """Returns the source of an input (built in, of the Hub, or a folder of images); UserError if there is none."""
    location = settings.source if settings.source in BUILT_IN else f"{settings.name}={settings.source}"
    return find_source(location, options_of(settings, recipe))


def options_of(settings: InputSettings, recipe: CorpusRecipe) -> SourceOptions:
    """Returns the reading options of an input's documents."""
    return SourceOptions(
        cache=files.cache_folder(),
        passage_chars=recipe.document_chars,
        text_column=settings.text_column,
        image_column=settings.image_column,
        split_column=settings.split_column,
        group_column=settings.group_column,
        licence=settings.licence,
    )


def _is_picture_folder(path: Path) -> bool:
    """Whether a folder is read as image files with captions, as by ``m6 data build``."""
    if path.is_file():
        return False
    names = [file.name.lower() for file in path.rglob("*") if not is_hidden(file.relative_to(path))]
    if any(name in METADATA for name in names):
        return True
    others = any(name.endswith((*TABLES, *ARCHIVES, *TARS)) for name in names)
    return not others and any(name.endswith(tuple(PICTURE_SUFFIXES)) for name in names)


@dataclass(frozen=True)
class _Found:
    """A file of an input: its path relative to the input's folder, its entry, and why it is not opened, if so."""

    name: PurePath
    entry: InputFile
    unreadable: str | None


def _local_files(settings: InputSettings, path: Path, checksums: Checksums) -> list[_Found]:
    folder = path.parent if path.is_file() else path
    names = choose_files(settings, [file.relative_to(folder) for file in below(path)])
    if not names:
        raise UserError(f"{path}: expected pictures, or files {', '.join(FORMS)}")
    reasons = {name: unreadable_reason(folder, folder / name) for name in names}
    read = [name for name, reason in reasons.items() if reason is None]
    entries = dict(zip(read, checksums.entries([folder / name for name in read]), strict=True))
    return [
        _Found(name, entries.get(name, InputFile(path=str(folder / name), bytes=0, modified_ns=0, sha256="")), reason)
        for name, reason in reasons.items()
    ]


def _remote_files(settings: InputSettings) -> list[_Found]:
    url = settings.source
    listed = list_remote(url, lambda name: suffix_of(name) is not None)
    names = set(choose_files(settings, [file.name for file in listed]))
    if not names or any(file.name.name.lower() in METADATA for file in listed):
        raise UserError(
            f"{url}: expected files {', '.join(FORMS)}; "
            "a folder of pictures must be on this machine, or be packed to .tar"
        )
    return [
        _Found(
            file.name,
            InputFile(path=file.url, bytes=file.bytes, modified_ns=0, sha256=file.key, name=str(file.name)),
            file.problem,
        )
        for file in listed
        if file.name in names
    ]


def _add_files(plan: Plan, settings: InputSettings, found: list[_Found]) -> None:
    if settings.licence is None:
        raise UserError(f'inputs: "{settings.called}" has no licence; it is recorded in the manifest: add "licence"')
    kinds = {_kind_of(file.name, settings) for file in found}
    if len(kinds) > 1:
        raise UserError(
            f'{settings.source}: "{settings.called}" has files of texts and of pictures: name them as two inputs'
        )
    if all(suffix_of(file.name) in TEXTS for file in found):
        folders = split_folders(settings.called, [file.name for file in found])
        splits = {file.name: split_of_folder(file.name, folders) for file in found}
    else:
        splits = splits_of_files(settings.called, [file.name for file in found])
    checksums: list[tuple[str, str]] = []
    texts: list[int] = []
    for file in found:
        number = len(plan.files)
        plan.files.append(file.entry.model_copy(update={"split": splits[file.name]}))
        if file.unreadable is not None:
            plan.parts.append(Part(input=settings.called, files=[number], unreadable=file.unreadable))
            continue
        checksums.append((file.name.as_posix(), file.entry.sha256))
        if suffix_of(file.name) in TEXTS:
            texts.append(number)
        else:
            plan.parts.append(Part(input=settings.called, files=[number]))
    for begin in range(0, len(texts), _FILES_OF_A_PART):
        plan.parts.append(Part(input=settings.called, files=texts[begin : begin + _FILES_OF_A_PART]))
    columns = options_columns(settings) if len(texts) < len(checksums) else None
    named = {split for split in splits.values() if split is not None}
    own = ("test", "train", "validation") if settings.split_column else sorted(named)
    plan.inputs[settings.called] = PlannedInput(
        kind=kinds.pop(),
        own_splits=list(own),
        origin=[
            Origin(
                package=settings.called,
                version="local",
                licence=settings.licence,
                sha256=combined_sha256(checksums),
                columns=columns,
            )
        ],
    )


def _kind_of(file: PurePath, settings: InputSettings) -> SourceKind:
    has_pictures = suffix_of(file) in TARS or (suffix_of(file) in TABLES and settings.image_column is not None)
    return "image_text" if has_pictures else "text"


def _files_of_pictures(named: NamedPictures) -> list[Path]:
    if not (found := files_of(named.path, _SETS)):
        raise UserError(f"decontamination.picture_sets: {named.path}: expected pictures, .parquet or .tar files")
    check_readable("decontamination.picture_sets", named.path, found)
    return found


def _add_set(plan: Plan, named: NamedPictures, found: list[Path], entries: list[InputFile]) -> None:
    plan.sets.append(named.name)
    plan.checksums.setdefault("picture_sets", {})[named.name] = _combined(named.path, entries)
    pictures: list[int] = []
    for file, entry in zip(found, entries, strict=True):
        number = len(plan.files)
        plan.files.append(entry)
        if suffix_of(file, tuple(PICTURE_SUFFIXES)):
            pictures.append(number)
        else:
            plan.parts.append(Part(input=named.name, files=[number]))
    for begin in range(0, len(pictures), _FILES_OF_A_PART):
        plan.parts.append(Part(input=named.name, files=pictures[begin : begin + _FILES_OF_A_PART]))


def _combined(path: Path, entries: list[InputFile]) -> str:
    folder = path if path.is_dir() else path.parent
    return combined_sha256((Path(entry.path).relative_to(folder).as_posix(), entry.sha256) for entry in entries)


def options_columns(settings: InputSettings) -> dict[str, str]:
    """Returns the columns of an input's tables by role: text, image, split and group."""
    chosen = {
        "text": settings.text_column,
        "image": settings.image_column,
        "split": settings.split_column,
        "group": settings.group_column,
    }
    return {role: column for role, column in chosen.items() if column is not None}
