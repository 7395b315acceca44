"""Last stages: remove contaminated documents, cut the rest into passages, and write the data folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from m6 import files
from m6.corpus.counters import KEPT as KEPT_SAMPLES
from m6.corpus.counters import SAMPLE_CHARS, Counters, small_picture
from m6.corpus.plan import Plan
from m6.corpus.selection import KEPT, REASONS
from m6.corpus.text_copies import hashes_of_set, ngram_hashes, read_index, shares_ngram, write_index
from m6.corpus.work import Work, read_document, read_documents
from m6.data.manifest import MANIFEST_NAME, SPLITS, Manifest, Shard, SourceEntry, Split, SplitEntry
from m6.data.overlap import Contents, count_groups, known_keys
from m6.data.shards import SplitWriters, describe_source
from m6.data.sources.base import Row
from m6.data.sources.text import passages
from m6.data.splitting import SplitRules
from m6.data.verification import check_sizes
from m6.errors import UserError
from m6.validation import describe

RECORD_NAME = "corpus.json"
_Splits = TypeAdapter(dict[Split, SplitEntry])


class CorpusRecord(BaseModel):
    """``corpus.json`` of a data folder: counts of kept and removed documents.

    Attributes:
        inputs: counts by input.
        sets: counts by set of ``decontamination.sets``; "kept" counts the compared texts.
    """

    model_config = ConfigDict(extra="forbid")

    inputs: dict[str, Counters]
    sets: dict[str, Counters] = {}


def load_record(folder: Path) -> CorpusRecord:
    """Reads the record of a data folder; UserError if ``m6 data corpus`` did not make the folder."""
    file = folder / RECORD_NAME
    if not file.is_file():
        raise UserError(f'{file} does not exist: {folder} was not made by "m6 data corpus"')
    try:
        return CorpusRecord.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(f"{file} is not the record of a corpus: {describe(error, CorpusRecord, '')}") from None


def index_held_out(work: Work, unit: int) -> Counters:
    """Writes the n-grams of the held-out documents of a part, or of a named set.

    The units of the parts come first, then those of the named sets.

    Returns:
        The counts of a named set; for a part, empty counts.

    Raises:
        UserError: a file of the set has changed since the plan, or no text can be compared.
    """
    ngram_chars = work.recipe.decontamination.ngram_chars
    counters = Counters()
    hashes: Iterator[NDArray[np.uint64]]
    if unit < work.num_parts:
        is_text = work.plan.kind(work.plan.parts[unit]) == "text"
        texts = (row.text for row, split in _kept(work, unit, Counters()) if split != "train") if is_text else iter(())
        hashes = (ngram_hashes(text, ngram_chars) for text in texts)
    else:
        named = work.recipe.decontamination.sets[unit - work.num_parts]
        work.plan.check_set(named)
        hashes = hashes_of_set(named, ngram_chars, counters)
    write_index(_index(work, f"{unit:05d}"), hashes)
    return counters


def join_index(work: Work) -> Counters:
    """Joins the n-grams of the held-out documents of all parts."""
    parts = (np.load(_index(work, f"{part:05d}")) for part in range(work.num_parts))
    write_index(_index(work, "joined"), parts)
    return Counters()


def write_part(work: Work, part: int) -> Counters:
    """Writes the shards of a part. Returns counts of removed and written documents."""
    recipe, name = work.recipe, work.plan.parts[part].input
    if name in work.plan.sets:
        return Counters()
    indexes = {"the validation or test split": read_index(_index(work, "joined"))}
    for number, named in enumerate(recipe.decontamination.sets, start=work.num_parts):
        indexes[f"the set {named.name}"] = read_index(_index(work, f"{number:05d}"))
    counters = Counters()
    with SplitWriters(_data(work), name, f"{name}-{part:05d}") as writers:
        for row, split in _kept(work, part, counters):
            if split == "train" and (found := _contaminated(row, indexes, recipe.decontamination.ngram_chars)):
                counters.remove("decontamination", f"shares text with {found}", row.id, row.text)
                continue
            _count_kept(counters, row)
            for each in _rows(row, recipe.passage_chars):
                writers.write(each, split)
                counters.rows += 1
    keys: dict[str, Any] = {
        f"{split}_{name}": values
        for split, contents in writers.contents.items()
        for name, values in contents.state().items()
    }
    with files.atomic_path(_keys(work, part)) as temporary, temporary.open("wb") as file:
        np.savez(file, **keys)
    files.write_json(_entries(work, part), _Splits.dump_python(writers.splits, exclude_none=True))
    return counters


def finish(work: Work) -> Counters:
    """Writes the manifest and the record, checks the sizes of all shards, and gives the data folder its name.

    Raises:
        UserError: a shard is missing or has another size.
        StorageError: the file system does not answer.
        OSError: the name is taken.
    """
    data, entries, tallies = _data(work), {}, {}
    for name in work.plan.inputs:
        parts = [number for number, part in enumerate(work.plan.parts) if part.input == name]
        tallies[name] = _joined_tally(work, parts)
        entries[name] = _describe(work, name, parts, tallies[name])
    # Sizes are enough here: checksums were computed from the written files and are compared when the folder is read.
    for entry in entries.values():
        for split in entry.splits.values():
            check_sizes(data, split.shards)
    sets = work.recipe.decontamination.sets
    counts = {named.name: work.counters("held_out", unit) for unit, named in enumerate(sets, start=work.num_parts)}
    record = CorpusRecord(inputs=tallies, sets=counts)
    files.write_json(data / RECORD_NAME, record.model_dump(exclude_none=True))
    Manifest(recipe=work.plan.manifest_recipe(), sources=entries).save(data)
    files.sync_folder(data)
    out = work.recipe.out
    os.replace(data, out)
    files.sync(out.parent)
    return Counters()


def is_built(out: Path, plan: Plan) -> bool:
    """Whether ``out`` is the finished corpus of this plan.

    Raises:
        UserError: ``out`` holds something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if (out / MANIFEST_NAME).is_file():
        manifest = Manifest.load(out)
        origins = {name: entry.origin for name, entry in manifest.sources.items()}
        planned = {name: entry.origin for name, entry in plan.inputs.items()}
        if (manifest.recipe, origins) == (plan.manifest_recipe(), planned):
            return True
    raise UserError(f"{out} is not empty and is not this corpus; choose another folder or remove it")


def _rows(row: Row, passage_chars: int) -> Iterator[Row]:
    """Yields a document's rows of the data folder: an image with its caption, or passages."""
    if row.image is not None:
        yield row
        return
    for number, passage in enumerate(passages(row.text, passage_chars)):
        yield replace(row, id=f"{row.id}/{number}", text=passage)


def _count_kept(counters: Counters, row: Row) -> None:
    counters.kept += 1
    counters.kept_characters += len(row.text)
    counters.count(KEPT_SAMPLES, row.text)
    if row.image is not None:
        counters.sample(KEPT_SAMPLES, row.id, row.text, row.image)


def _kept(work: Work, part: int, counters: Counters) -> Iterator[tuple[Row, Split]]:
    """Yields the kept documents of a part with their splits, and counts the others as removed."""
    planned = work.plan.inputs[work.plan.parts[part].input]
    recipe = work.recipe
    rules = SplitRules(recipe.validation_share, recipe.test_share, frozenset(planned.own_splits))
    with np.load(work.decisions(part)) as decisions:
        status, kept_part, kept_row = (decisions[name] for name in ("status", "kept_part", "kept_row"))
    for number, row in enumerate(read_documents(work.documents(part))):
        if status[number] == KEPT:
            assert row.group is not None
            yield row, rules.split(row.group, row.split)
        else:
            instead = (int(kept_part[number]), int(kept_row[number]))
            copy_of = None if instead == (part, number) else instead
            counters.remove(*REASONS[int(status[number])], row.id, row.text, row.image, copy_of)


def _contaminated(row: Row, indexes: dict[str, NDArray[np.uint64]], ngram_chars: int) -> str | None:
    if row.image is not None:  # copies of held-out images were removed with the other copies
        return None
    hashes = ngram_hashes(row.text, ngram_chars)
    return next((name for name, index in indexes.items() if shares_ngram(hashes, index)), None)


def _joined_tally(work: Work, parts: list[int]) -> Counters:
    counters = Counters()
    for part in parts:
        for stage in ("clean", "write"):
            counters.add(work.counters(stage, part))
    for samples in counters.samples.values():
        for sample in samples:
            if sample.copy_of is not None:
                kept = read_document(work.documents(sample.copy_of[0]), sample.copy_of[1])
                sample.kept_id, sample.kept_text, sample.copy_of = kept.id, kept.text[:SAMPLE_CHARS], None
                sample.kept_picture = None if kept.image is None else small_picture(kept.image)
    return counters


def _describe(work: Work, name: str, parts: list[int], counters: Counters) -> SourceEntry:
    contents = {split: Contents() for split in SPLITS}
    for part in parts:
        contents["validation"].add_state(_state(work, part, "validation"))
        contents["test"].add_state(_state(work, part, "test"))
    known = known_keys([contents["validation"], contents["test"]])
    for part in parts:
        contents["train"].add_state(_state(work, part, "train"), known)
    groups = count_groups(_contents(work, part, split) for part in parts for split in SPLITS)
    shards: dict[Split, list[Shard]] = {split: [] for split in SPLITS}
    for part in parts:
        for split, entry in _Splits.validate_json(_entries(work, part).read_bytes()).items():
            shards[split] += entry.shards
    splits = {split: SplitEntry.of(found) for split, found in shards.items()}
    planned = work.plan.inputs[name]
    skipped = Counter(
        {f"{stage}: {why}": n for stage, reasons in counters.removed.items() for why, n in reasons.items()}
    )
    return describe_source(
        planned.kind, planned.own_splits, planned.origin, splits, contents, groups, skipped, counters.unread
    )


def _state(work: Work, part: int, split: Split) -> dict[str, NDArray[Any]]:
    """The keys and signatures of a part's rows in a split, for ``Contents``."""
    with np.load(_keys(work, part)) as keys:
        return {name: keys[f"{split}_{name}"] for name in ("keys", "signatures")}


def _contents(work: Work, part: int, split: Split) -> Contents:
    contents = Contents()
    contents.add_state(_state(work, part, split))
    return contents


def _data(work: Work) -> Path:
    return work.folder / "data"


def _index(work: Work, name: str) -> Path:
    return work.folder / "held_out" / f"{name}.npy"


def _keys(work: Work, part: int) -> Path:
    return work.folder / "write" / f"{part:05d}.npz"


def _entries(work: Work, part: int) -> Path:
    return work.folder / "write" / f"{part:05d}.json"
