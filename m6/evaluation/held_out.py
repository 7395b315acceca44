"""The data that a run is evaluated on: its own, or another folder, with the run's tokenizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from m6.checkpoints.tokenizers import IMAGE_TOKENIZER, TOKENIZER, find_tokenizer
from m6.config.run import RunConfig
from m6.data.manifest import Manifest
from m6.data.objectives import OBJECTIVES, reads_codes, source_kind
from m6.data.pretraining import PretrainingData
from m6.errors import UserError
from m6.runs.data import open_data


def open_held_out(run_dir: Path, config: RunConfig, folder: Path | None, split: str) -> PretrainingData:
    """Opens one split for the run's objectives.

    Of the run's own folder the run's sources are read; of another one all. Objectives without rows are left out.

    Args:
        run_dir: the run, whose tokenizers are used.
        config: its configuration.
        folder: a data folder; None: the run's own.
        split: name of a split.

    Raises:
        UserError: the folder or the split is missing or has no rows for an objective of the run; or its image codes
            are those of another image tokenizer.
    """
    settings = config.m6
    manifest = Manifest.load(folder or settings.data.path)
    given = settings.data.sources if folder is None else None
    names = manifest.sources if given is None else [name for name, weight in given.items() if weight > 0]
    sources = {name: 1.0 for name in names if manifest.split(name, split).rows}
    kinds = {manifest.sources[name].kind for name in sources}
    active = [name for name in OBJECTIVES if settings.objectives.of(name).weight > 0]
    read = [name for name in active if source_kind(name) in kinds]
    if not read:
        wanted = " or ".join(sorted({f'"{source_kind(name)}"' for name in active}))
        raise UserError(
            f'{manifest.folder}: split "{split}" has no rows for the objectives of {run_dir} ({", ".join(active)}); '
            f"expected sources of kind {wanted}"
        )
    silent = {name: settings.objectives.of(name).model_copy(update={"weight": 0.0}) for name in {*active} - {*read}}
    image_tokenizer = settings.data.image_tokenizer if any(map(reads_codes, read)) else None
    if image_tokenizer is not None:
        image_tokenizer = str(find_tokenizer(run_dir, IMAGE_TOKENIZER, image_tokenizer))
    data = settings.data.model_copy(
        update={
            "path": manifest.folder,
            "tokenizer": find_tokenizer(run_dir, TOKENIZER, settings.data.tokenizer),
            "image_tokenizer": image_tokenizer,
            "sources": sources,
        }
    )
    objectives = settings.objectives.model_copy(update=silent)
    return open_data(replace(config, m6=settings.model_copy(update={"data": data, "objectives": objectives})), split)
