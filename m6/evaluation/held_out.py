"""The evaluation data of a run: its own folder or another one, read with the run's tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from m6.checkpoints.provenance import initial_of
from m6.config.run import RunConfig, load_config
from m6.data.codes import has_codes
from m6.data.manifest import MANIFEST_NAME, SPLITS, Manifest, Shard
from m6.data.objectives import OBJECTIVES, reads_codes, source_kind
from m6.data.overlap import describe_shared
from m6.data.pretraining import PretrainingData
from m6.data.weights import source_weights
from m6.errors import UserError
from m6.runs.data import kept_sources, open_data


def open_held_out(run_dir: Path, config: RunConfig, folder: Path | None, split: str) -> PretrainingData:
    """Opens one split for the run's objectives.

    From the run's own folder, the sources of its training are read; from another folder, all sources. Objectives
    without rows or image codes are left out.

    Args:
        run_dir: the run.
        config: configuration of the run, with the tokenizers to use.
        folder: a data folder; None: the run's own.
        split: name of a split.

    Raises:
        UserError: the folder or the split is missing or has no rows for an objective of the run; or all its objectives
            need image codes, and the folder has none of the run's image tokenizer.
    """
    settings = config.m6
    if folder is None and not (settings.data.path / MANIFEST_NAME).is_file():
        raise UserError(
            f"{run_dir} learned from {settings.data.path.absolute()}, which is missing; give another folder by --data"
        )
    manifest = Manifest.load(folder or settings.data.path)
    learned = None if folder is not None else source_weights(manifest, "train", settings.data.sources)
    names = manifest.sources if learned is None else learned
    sources = {name: 1.0 for name in names if manifest.split(name, split).rows}
    kinds = {manifest.sources[name].kind for name in sources}
    active = [name for name in OBJECTIVES if settings.objectives.of(name).weight > 0]
    read = [name for name in active if source_kind(name) in kinds]
    if not sources:
        raise UserError(
            f'{manifest.folder}: split "{split}" of {", ".join(names)} is empty; build the data with a larger '
            "--validation-share or --test-share, or evaluate another split by --split"
        )
    if not read:
        wanted = " or ".join(sorted({f'"{source_kind(name)}"' for name in active}))
        raise UserError(
            f'{manifest.folder}: split "{split}" has no rows for the objectives of {run_dir} ({", ".join(active)}); '
            f"expected sources of kind {wanted}"
        )
    image_tokenizer = settings.data.image_tokenizer if any(map(reads_codes, read)) else None
    if image_tokenizer is not None:
        from m6.tokenizers.image import load_image_tokenizer

        without = [name for name in read if not reads_codes(name)]
        if without and not has_codes(manifest, load_image_tokenizer(image_tokenizer).checksum):
            read, image_tokenizer = without, None
    silent = {name: settings.objectives.of(name).model_copy(update={"weight": 0.0}) for name in {*active} - {*read}}
    data = settings.data.model_copy(
        update={
            "path": manifest.folder,
            "image_tokenizer": image_tokenizer,
            "sources": sources,
            "temperature": 1.0,
            "max_epochs": None,
        }
    )
    objectives = settings.objectives.model_copy(update=silent)
    return open_data(replace(config, m6=settings.model_copy(update={"data": data, "objectives": objectives})), split)


def describe_left_out(config: RunConfig, data: PretrainingData) -> str:
    """Names objectives of the run without evaluation data, with reasons; empty if there are none."""
    sentences = []
    for name in OBJECTIVES:
        if config.m6.objectives.of(name).weight > 0 and name not in data.active_objectives:
            reason = f'the folder has no sources of kind "{source_kind(name)}" with rows in this split'
            if reads_codes(name) and any(data.manifest.sources[s].kind == source_kind(name) for s in data.sources):
                command = f"m6 data codes {data.manifest.folder} --image-tokenizer {config.m6.data.image_tokenizer}"
                reason = f"the folder has no codes of the run's image tokenizer; `{command}` makes them"
            sentences.append(f"{name} is left out: {reason}.")
    return " ".join(sentences)


def describe_overlap(run_dir: Path, data: PretrainingData) -> str:
    """Describes the overlap of the evaluated split with training, as counted in the manifest of its data folder."""
    sentences = [describe_shared(data.manifest, data.sources, [split for split in SPLITS if split == data.split])]
    if data.split == "train":
        sentences = ["These are training rows."]
    return " ".join(filter(None, [*sentences, describe_other_training(run_dir, data.manifest, data.sources)]))


def describe_other_training(run_dir: Path, manifest: Manifest, sources: Sequence[str]) -> str:
    """Describes training of the run, or of runs before it, on other data than the training rows of these sources."""
    initial = initial_of(run_dir, load_config(run_dir / "config.json"))
    before = initial.lineage() if initial else []
    runs = [("The run", kept_sources(run_dir))]
    runs += [(f"The run {run.name}, from which it began,", run.sources) for run in before if run.steps is not None]
    own = {shard.sha256 for name in sources for shard in _shards(manifest, name)}
    sentences = []
    for run, known in runs:
        if known is None:
            sentences.append(f"{run} kept no record of its data: what of it is in these rows is not known.")
        elif not own & {shard.sha256 for name in known.sources for shard in _shards(known, name)}:
            sentences.append(f"{run} learned from other data: what of it is in these rows was not counted.")
    sentences += [
        f"It is not known what {run.name}, from which it began, has seen." for run in before if run.steps is None
    ]
    return " ".join(sentences)


def _shards(manifest: Manifest, source: str) -> list[Shard]:
    return manifest.split(source, "train").shards
