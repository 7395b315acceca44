"""Which folders and files of the user's own data are splits, by their names."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath

from m6.data.manifest import SPLITS, Split
from m6.data.sources.base import SourceOptions

# The names that Hugging Face Datasets knows for splits.
SPLIT_WORDS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# A number of a shard may follow, as in train-0000 and train-00000-of-00002; the Hub once added a checksum to it.
_FORM = re.compile(rf"({'|'.join(SPLIT_WORDS)})([-_.]\d+([-_]of[-_]\d+(-[0-9a-f]+)?)?)?")


def own_splits(options: SourceOptions, named: Iterable[Split | None]) -> frozenset[Split]:
    """Returns the splits that a source defines: by its split column, or by the names of folders and files."""
    return frozenset(SPLITS if options.split_column is not None else filter(None, named))


def split_meant(name: str) -> Split | None:
    """Returns the split that a word of a name means, as in ``validation_matched``, which may also be chance."""
    return next((SPLIT_WORDS[part] for part in re.split("[^a-z]+", name.lower()) if part in SPLIT_WORDS), None)


def split_folders(source: str, files: Iterable[PurePath]) -> dict[str, Split]:
    """Returns the splits of the folders at the top of a source, by their names.

    Empty unless all of them are named after splits: a class or a topic may be called ``train`` or ``dev`` as well.
    What is not taken for a split is said on stderr, because held-out rows would become training rows.

    Args:
        source: name of the source.
        files: the files that are read, relative to the source.
    """
    named = {file.parts[0]: _split_of_name(file.parts[0]) for file in files if len(file.parts) > 1}
    splits = {folder: split for folder, split in named.items() if split is not None}
    if len(splits) == len(named):
        return splits
    if splits:
        other = next(folder for folder, split in named.items() if split is None)
        print(
            f'note: "{source}": its folders are no splits, although "{next(iter(splits))}" is named after one: '
            f'"{other}" is not',
            file=sys.stderr,
        )
    return {}


def split_of_file(file: PurePath, folders: Mapping[str, Split]) -> Split | None:
    """Returns the split that a file is named after, or else that of its folder at the top.

    Args:
        file: relative to the source.
        folders: what ``split_folders`` returned.
    """
    return _split_of_name(PurePath(file.name.lower().removesuffix(".gz")).stem) or split_of_folder(file, folders)


def split_of_folder(file: PurePath, folders: Mapping[str, Split]) -> Split | None:
    """Returns the split of the folder at the top that a file is in, as ``split_of_file`` does."""
    return folders.get(file.parts[0])


def splits_of_files(source: str, folder: Path, files: Sequence[Path]) -> dict[Path, Split | None]:
    """Returns the split of each file; what is not taken for one is said on stderr, as by ``split_folders``.

    A word in a longer name, as in ``data_train.csv``, counts if every file has one and some are for training: else it
    may be chance, as in ``ab_test.csv``.

    Args:
        source: name of the source.
        folder: of the source.
        files: in the folder.
    """
    relative = {file: file.relative_to(folder) for file in files}
    folders = split_folders(source, relative.values())
    splits = {file: split_of_file(name, folders) for file, name in relative.items()}
    meant = {file: split_meant(file.name) for file in files}
    if not any(splits.values()) and all(meant.values()) and "train" in meant.values():
        return meant
    for file, split in meant.items():
        if splits[file] is None and split is not None:
            print(
                f'note: "{source}": {relative[file]} is not taken for the split {split}; if it is, name it '
                f"{split}{file.suffix}, or {split}-0000{file.suffix} and so on",
                file=sys.stderr,
            )
            break
    return splits


def _split_of_name(name: str) -> Split | None:
    match = _FORM.fullmatch(name.lower())
    return SPLIT_WORDS[match[1]] if match else None
