"""Opens the data of a run, checks whether the model can read it, and records its origin."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from m6.config.checks import check_captions, check_codes_fit, check_tokenizer
from m6.config.run import RunConfig
from m6.data.captions import SeenCaptions
from m6.data.manifest import Manifest
from m6.data.objectives import reads_pixels, source_kind
from m6.data.pretraining import PretrainingData
from m6.errors import UserError
from m6.files import write_json
from m6.runs.directory import CAPTIONS, SOURCES
from m6.validation import read_model, read_record

_LOOKED_AT = 200  # training rows of a source
_MAX_CAPTIONS = 1_000_000  # reading more would delay the start of a run by more than half a minute


def open_data(config: RunConfig, split: str = "train") -> PretrainingData:
    """Opens the run's micro-batches, of one split and of validation.

    Raises:
        UserError: the data folder, the tokenizer or the image tokenizer does not fit the model.
    """
    settings = config.m6
    data = PretrainingData(
        settings.data,
        settings.objectives,
        split=split,
        seed=settings.training.seed,
        micro_batch_size=config.deepspeed.micro_batch_size,
        samples_per_step=config.deepspeed.train_batch_size,
        total_samples=config.batch_sizes.before(settings.training.total_steps),
        image_size=config.model.image_size,
        patch_size=config.model.patch_size,
    )
    check_tokenizer(config, data.tokenizer)
    if data.codes is not None:
        codes = data.codes
        check_codes_fit(config.model, codes.codebook_size, codes.num_codes, codes.codes_per_place)
        captions = [] if settings.samples is None else settings.samples.captions
        check_captions(config.model, data.tokenizer, captions, data.codes.num_codes)
    return data


def check_sources_are_read(data: PretrainingData) -> None:
    """Raises UserError if ``m6.data.sources`` gives a weight to a source, but no objective of the run reads it."""
    if data.settings.sources is None:
        return
    kinds = {source_kind(name) for name in data.active_objectives}
    for source in data.sources:
        if (kind := data.manifest.sources[source].kind) not in kinds:
            raise UserError(
                f'm6.data.sources: no objective with a weight reads "{source}", which is of kind "{kind}"; leave it out'
            )


def data_warnings(config: RunConfig, data: PretrainingData) -> list[str]:
    """Warnings about data lost to the model.

    They are about images stored smaller than the model reads them, and about the ends of captions, questions and texts.
    The end of a plain text without a label or an image is no loss, so it causes no warning.
    """
    kinds = {name: data.manifest.sources[name].kind for name in data.sources}
    pairs = itertools.product(data.active_objectives, data.sources)
    read = [(objective, source) for objective, source in pairs if kinds[source] == source_kind(objective)]
    shrunken = data.manifest.shrunken(config.model.image_size)
    found = [shrunken] if shrunken and any(reads_pixels(objective) for objective, _ in read) else []
    for objective, source in read:
        if kinds[source] == "text":
            continue
        lengths, kept = data.text_lengths(objective, source, _LOOKED_AT)
        if cut := sum(length > kept for length in lengths):
            found.append(
                f"m6.data.sequence_length {config.m6.data.sequence_length} leaves {kept} tokens of text for "
                f'{objective}; of the first {len(lengths)} training rows of "{source}" {cut} are longer, up to '
                f"{max(lengths)}, and their ends are cut off"
            )
    return found


def keep_sources(root: Path, data: PretrainingData) -> None:
    """Writes RUN/sources.json: the entries of ``manifest.json`` for the sources of the run.

    Kinds, licences and origins then stay known without the data folder.
    """
    read = {name: data.manifest.sources[name] for name in data.sources}
    write_json(root / SOURCES, Manifest(sources=read).model_dump(exclude_none=True, include={"format", "sources"}))


def kept_sources(root: Path) -> Manifest | None:
    """Reads RUN/sources.json; None if a run has no such file.

    Raises:
        UserError: the file is damaged.
    """
    return read_record(Manifest, root / SOURCES)


def keep_captions(root: Path, data: PretrainingData, init: Path | None) -> None:
    """Writes RUN/captions.json if a run learns to draw and has no such file: its own captions and those of ``init``.

    Args:
        root: the run.
        data: of the run; its training rows cannot change while it is trained.
        init: the run or the exported model of the initial weights.
    """
    if (root / CAPTIONS).exists() or (seen := data.seen_captions(_MAX_CAPTIONS)) is None:
        return
    before = None if init is None else kept_captions(init)
    write_captions(root, seen if before is None else seen.with_those_of(before))


def write_captions(folder: Path, seen: SeenCaptions) -> None:
    """Writes the record to the folder of a run or of an exported model."""
    write_json(folder / CAPTIONS, seen.model_dump())


def kept_captions(folder: Path) -> SeenCaptions | None:
    """Reads captions.json of a run or of an exported model; None if there is no such file.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / CAPTIONS
    if not file.exists():
        return None
    try:
        return read_model(SeenCaptions, file)
    except UserError as error:
        raise UserError(f"{error}; restore it, or remove it to draw without warnings of unknown captions") from None


def check_sources_unchanged(root: Path, data: PretrainingData) -> None:
    """Raises UserError if the training rows differ from RUN/sources.json. Without this file nothing is checked.

    The rows of a step depend on all training rows of all sources. With other rows the mixture and the order would
    change from this step on, and the record of the run's training data would be lost. Held-out rows, licences and
    origins may change.
    """
    kept = kept_sources(root)
    if kept is None:
        return
    before, now = _training_data(kept, kept.sources), _training_data(data.manifest, data.sources)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) == now.get(name):
            continue
        change = "is new" if name not in before else "is missing" if name not in now else "has other training rows"
        raise UserError(
            f'{data.manifest.folder} has changed since {root} learned from it: source "{name}" {change}, by '
            f"{root / SOURCES}; restore the data, or begin again at step 0 with --restart"
        )


def _training_data(manifest: Manifest, sources: Iterable[str]) -> dict[str, tuple[str, list[str]]]:
    """The kind and the checksums of the shards of each source. They decide which objective reads which rows."""
    return {
        name: (manifest.sources[name].kind, [shard.sha256 for shard in manifest.split(name, "train").shards])
        for name in sources
    }
