"""A run keeps copies of its tokenizers, so it can be used from any folder and without ``data/``.

RUN/tokenizer/          of texts
RUN/image_tokenizer/    of images, if the run learns to draw
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from m6.config.run import RunConfig
from m6.errors import UserError
from m6.files import copy_folder
from m6.lock import new_folder
from m6.tokenizers.text import M6Tokenizer, load_text_tokenizer

TOKENIZER, IMAGE_TOKENIZER = "tokenizer", "image_tokenizer"
_FOLDERS = (TOKENIZER, IMAGE_TOKENIZER)


def keep_tokenizers(root: Path, tokenizer: M6Tokenizer, image_tokenizer: str | Path | None) -> None:
    """Copies the tokenizers of a run to its folder, unless equal copies are there.

    Args:
        root: the run's folder.
        tokenizer: of texts.
        image_tokenizer: folder of the image tokenizer; None: the run does not draw.
    """
    kept = root / TOKENIZER
    if not kept.is_dir() or load_text_tokenizer(kept).fingerprint != tokenizer.fingerprint:
        _replace(kept, lambda folder: tokenizer.save_pretrained(str(folder)))
    if image_tokenizer is not None:
        # Imported here: only drawing needs its packages.
        from m6.tokenizers.image import load_image_tokenizer

        kept, loaded = root / IMAGE_TOKENIZER, load_image_tokenizer(image_tokenizer)
        if not kept.is_dir() or load_image_tokenizer(kept).checksum != loaded.checksum:
            _replace(kept, loaded.save_pretrained)


def copy_kept_tokenizers(source: Path, out: Path) -> None:
    """Copies the kept tokenizers of a run to another run's folder, if it has any."""
    for name in _FOLDERS:
        if (source / name).is_dir():
            copy_folder(source / name, out / name)


Location = TypeVar("Location", str, Path)


def find_tokenizer(root: Path, name: str, configured: Location) -> Location | Path:
    """Returns where a run's tokenizer is: the copy in the run, or without a copy the folder or name in its JSON.

    Args:
        root: the run's folder.
        name: ``TOKENIZER`` or ``IMAGE_TOKENIZER``.
        configured: the folder in the run's JSON, or for images a name on the Hub.

    Raises:
        UserError: there is no copy, and the folder is missing.
    """
    kept = root / name
    if kept.is_dir():
        return kept
    if isinstance(configured, Path) and not configured.exists():
        raise UserError(f"{root} keeps no {name}, and {configured}, which its config.json names, is missing")
    return configured


def with_kept_tokenizers(root: Path, config: RunConfig) -> RunConfig:
    """The configuration of the run in ``root`` with the results of ``find_tokenizer`` as its tokenizers.

    The folders in its JSON may be missing, or hold other tokenizers.

    Raises:
        UserError: see ``find_tokenizer``.
    """
    data = config.m6.data
    found: dict[str, Path | str] = {TOKENIZER: find_tokenizer(root, TOKENIZER, data.tokenizer)}
    if data.image_tokenizer is not None:
        found[IMAGE_TOKENIZER] = str(find_tokenizer(root, IMAGE_TOKENIZER, data.image_tokenizer))
    return replace(config, m6=config.m6.model_copy(update={"data": data.model_copy(update=found)}))


def _replace(folder: Path, save: Callable[[Path], object]) -> None:
    with new_folder(folder, replaces=True) as partial:
        save(partial)
