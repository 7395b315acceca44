"""Recognises splits by the names of folders and files of the user's own data."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from m6.data.manifest import SPLITS, Split
from m6.data.sources.base import SourceOptions

# The names of splits in Hugging Face Datasets.
SPLIT_WORDS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# A shard number may follow, as in train-0000 and train-00000-of-00002. Some Hub files add a checksum to it.
_FORM = re.compile(rf"({'|'.join(SPLIT_WORDS)})([-_.]\d+([-_]of[-_]\d+(-[0-9a-f]+)?)?)?")


def own_splits(options: SourceOptions, named: Iterable[Split | None]) -> frozenset[Split]:
    """Returns the splits defined by a source: by its split column, or by the names of folders and files."""
    return frozenset(SPLITS if options.split_column is not None else filter(None, named))


def split_meant(name: str) -> Split | None:
    """Returns the split meant by a word of a name, as in ``validation_matched``. The word may be there by chance."""
    return next((SPLIT_WORDS[part] for part in re.split("[^a-z]+", name.lower()) if part in SPLIT_WORDS), None)


def split_folders(source: str, files: Iterable[PurePath]) -> dict[str, Split]:
    """Returns the splits of the top folders of a source, by their names.

    Empty unless all top folders are named after splits: a class or a topic may also be called ``train`` or ``dev``. A
    word in a longer name, as in ``train2017``, counts if every folder has one and some are for training. Ignored names
    of splits are reported on stderr, because held-out rows might become training rows.

    Args:
        source: name of the source.
        files: the files of the source, relative to it.
    """
    folders = list(dict.fromkeys(file.parts[0] for file in files if len(file.parts) > 1))
    named = {folder: _split_of_name(folder) for folder in folders}
    meant = {folder: split_meant(folder) for folder in folders}
    if not all(named.values()) and "train" in meant.values():
        named = meant
    splits = {folder: split for folder, split in named.items() if split is not None}
    if len(splits) == len(named):
        return splits
    if any(meant.values()):
        like = next(folder for folder, split in meant.items() if split is not None)
        other = next((folder for folder, split in meant.items() if split is None), None)
        reason = "none is for training" if other is None else f'"{other}" is not'
        print(
            f'note: "{source}": its folders are no splits, although "{like}" is named after one: {reason}',
            file=sys.stderr,
        )
    return {}


def split_of_file(file: PurePath, folders: Mapping[str, Split]) -> Split | None:
    """Returns the split in the name of a file, or else the split of its top folder.

    Args:
        file: relative to the source.
        folders: result of ``split_folders``.
    """
    return _split_of_name(PurePath(file.name.lower().removesuffix(".gz")).stem) or split_of_folder(file, folders)


def split_of_folder(file: PurePath, folders: Mapping[str, Split]) -> Split | None:
    """Returns the split of a file's top folder. ``folders`` is as in ``split_of_file``."""
    return folders.get(file.parts[0])


def splits_of_files(source: str, files: Sequence[PurePath]) -> dict[PurePath, Split | None]:
    """Returns the split of each file. Ignored names of splits are reported on stderr, as by ``split_folders``.

    A word in a longer name, as in ``data_train.csv``, counts if every file has one and some are for training. Otherwise
    the word may be chance, as in ``ab_test.csv``.

    Args:
        source: name of the source.
        files: relative to the source.
    """
    folders = split_folders(source, files)
    splits = {file: split_of_file(file, folders) for file in files}
    meant = {file: split_meant(file.name) for file in files}
    if not any(splits.values()) and all(meant.values()) and "train" in meant.values():
        return meant
    for file, split in meant.items():
        if splits[file] is None and split is not None:
            print(
                f'note: "{source}": {file} is not taken for the split {split}; if it is, name it '
                f"{split}{file.suffix}, or {split}-0000{file.suffix} and so on",
                file=sys.stderr,
            )
            break
    return splits


def splits_of_hub(source: str, names: Iterable[str]) -> dict[str, Split | None]:
    """Returns the split meant by each split name of a Hub data set. Names without a meaning are noted on stderr.

    Args:
        source: name of the source.
        names: names of the splits. Only splits have these names, so a word in them, as in ``validation_matched``, is
            not chance.
    """
    splits = {name.strip(): split_meant(name) for name in names}
    for name, split in splits.items():
        if split is None:
            print(
                f'note: "{source}": the name of its split "{name}" does not say train, validation or test; its rows '
                "are divided as rows without a split are",
                file=sys.stderr,
            )
    return splits


def _split_of_name(name: str) -> Split | None:
    match = _FORM.fullmatch(name.lower())
    return SPLIT_WORDS[match[1]] if match else None
