"""The stages of a corpus in order, and their units. Tasks share the units of a stage.

clean      a part      read, check, normalise, filter; signatures of texts, keys of images
match      a part      score captions against their images by a trained model
pairs      a bucket    texts with equal signatures; images with matching keys and similar thumbnails
select     one         clusters, and the kept document of each
held_out   a part      n-grams of validation and test documents, and of the named sets
index      one         all of these together
write      a part      decontaminate, cut to passages, write shards
finish     one         manifest, record, the name of the data folder

The first stage reads, checks, cleans and filters the documents of a part, and writes their signatures. Images are
decoded, shrunk and filtered together with their captions, and get keys.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from m6.corpus.counters import Counters
from m6.corpus.output import finish, index_held_out, join_index, write_part
from m6.corpus.picture_copies import PictureWriter, write_picture_pairs
from m6.corpus.reading import read_part
from m6.corpus.recipe import CorpusRecipe, FilterSettings, PictureFilterSettings
from m6.corpus.rules import (
    compared_form,
    digest,
    mask_personal_data,
    problem_of,
    problem_of_caption,
    problem_of_picture,
    remove_boilerplate,
    stored_form,
    without_marks,
)
from m6.corpus.selection import select
from m6.corpus.text_copies import open_many_files, write_pairs, write_signatures
from m6.corpus.work import DocumentWriter, OpenScorer, Work, score_part
from m6.data.build import check_row
from m6.data.sources.base import Row, count_unread
from m6.data.sources.local import group_of_text
from m6.data.sources.pictures import BadPicture, Decoded, decode, on_white, square
from m6.errors import UserError


def clean_part(work: Work, part: int) -> Counters:
    """Writes the documents of a part after filtering, and their signatures. Returns counts of removals and changes."""
    recipe, planned = work.recipe, work.plan.parts[part]
    filters = recipe.input(planned.input).filters or recipe.filters
    counters = Counters()

    with DocumentWriter(work.documents(part)) as writer:

        def letters_of_kept() -> Iterator[str]:
            for row in read_part(recipe, work.plan, planned, work.fetched(part)):
                if (cleaned := _clean_text(row, recipe, filters, counters)) is not None:
                    compared = compared_form(cleaned.text)
                    order = digest(f"{cleaned.text}\n{cleaned.id}")
                    writer.write(cleaned, digest(compared), order, len(cleaned.text))
                    yield without_marks(compared)

        # The signatures take the documents one by one: document n of the file has signature n.
        write_signatures(letters_of_kept(), work.folder / "signatures", part, recipe.near_duplicates)
    return counters


def _clean_text(row: Row, recipe: CorpusRecipe, filters: FilterSettings, counters: Counters) -> Row | None:
    """Returns a document in its stored form, or None if a rule removed it."""
    counters.documents += 1
    row, problem = check_row(row, "text", max_chars=recipe.document_chars)
    if problem is not None:
        counters.remove("read", problem, row.id, row.text)
        return None
    counters.characters += len(row.text)
    counters.count("read", row.text)
    text = stored_form(row.text, recipe.to_simplified)
    if recipe.remove_boilerplate:
        text, lines = remove_boilerplate(text)
        counters.changed["boilerplate lines"] += lines
    if recipe.mask_personal_data:
        text, masked = mask_personal_data(text)
        counters.changed.update(masked)
    if problem := problem_of(text, filters):
        counters.remove("filter", problem, row.id, text)
        return None
    # The group is computed from the cleaned text: two documents may have differed in boilerplate lines only.
    return replace(row, text=text, group=row.group or group_of_text(text))


def clean_pictures(work: Work, part: int) -> Counters:
    """Writes the images of a part after filtering, and their keys. Returns counts of removals and changes.

    A part of a named set is not filtered: it keeps every decodable image, with or without a caption.
    """
    recipe, planned = work.recipe, work.plan.parts[part]
    is_named = planned.input in work.plan.sets
    filters = None if is_named else recipe.picture_filters_of(planned.input)
    counters = Counters()
    with DocumentWriter(work.documents(part)) as documents, PictureWriter(work.pictures, part) as pictures:
        for row in read_part(recipe, work.plan, planned, work.fetched(part)):
            if (cleaned := _clean_picture(row, recipe, filters, counters)) is None:
                continue
            row, decoded = cleaned
            picture = on_white(decoded.picture)
            row = replace(row, image=square(decoded))
            key = _digest_of_pixels(picture)
            order = digest(f"{key}\n{row.text}\n{row.id}")
            caption = digest(compared_form(row.text))
            group = row.group or (f"picture/{key:016x}" if row.answer else group_of_text(row.text))
            row = replace(row, group=group)
            documents.write(row, key, order, decoded.width * decoded.height, caption, is_named=is_named)
            pictures.write(picture)
    return counters


def _clean_picture(
    row: Row, recipe: CorpusRecipe, filters: PictureFilterSettings | None, counters: Counters
) -> tuple[Row, Decoded] | None:
    """Returns a row with its caption in the stored form and its decoded image, or None if a rule removed it."""
    counters.documents += 1
    count_unread(counters.unread, row.unread)
    row, problem = check_row(row, "text", max_chars=recipe.document_chars)
    if filters is None and problem == "empty text":
        problem = None
    if problem is None and row.image is None:
        problem = "missing image"
    if problem is not None or row.image is None:
        counters.remove("read", str(problem), row.id, row.text)
        return None
    try:
        decoded = decode(row.image, recipe.image_size)
    except BadPicture as error:
        counters.remove("read", str(error), row.id, row.text)
        return None
    counters.characters += len(row.text)
    counters.count("read", row.text, min(decoded.width, decoded.height))
    row = replace(row, text=stored_form(row.text, recipe.to_simplified))
    if recipe.mask_personal_data:
        text, masked = mask_personal_data(row.text)
        counters.changed.update(masked)
        row = replace(row, text=text)
    if filters and (problem := problem_of_picture(decoded, filters) or problem_of_caption(row.text, filters)):
        counters.remove("filter", problem, row.id, row.text, decoded.picture)
        return None
    return row, decoded


def _digest_of_pixels(picture: Image.Image) -> int:
    """The first 64 bits of the SHA-256 of an image's size and pixels."""
    contents = hashlib.sha256(f"{picture.width}x{picture.height}".encode())
    contents.update(picture.tobytes())
    return int.from_bytes(contents.digest()[:8], "little")


_NAMED = 5  # incomplete units named in a message


@dataclass(frozen=True)
class Stage:
    """A stage: its number of units, and the function for one unit."""

    name: str
    units: Callable[[Work], int]
    run: Callable[[Work, int], Counters]


def _clean_part(work: Work, part: int) -> Counters:
    open_many_files(work.num_text_parts)  # checks the limit now: later stages need it, hours from now
    is_text = work.plan.kind(work.plan.parts[part]) == "text"
    return clean_part(work, part) if is_text else clean_pictures(work, part)


def _buckets(work: Work) -> tuple[int, int]:
    """Numbers of buckets of texts and of images."""
    kinds, recipe = work.plan.kinds(), work.recipe
    return (
        recipe.near_duplicates.num_buckets if "text" in kinds else 0,
        recipe.picture_buckets if "image_text" in kinds else 0,
    )


def _write_pairs(work: Work, bucket: int) -> Counters:
    of_texts, of_pictures = _buckets(work)
    if bucket < of_texts:
        folders = (work.folder / "signatures", work.folder / "pairs")
        write_pairs(*folders, bucket, work.num_text_parts, work.recipe.near_duplicates)
    else:
        write_picture_pairs(work.pictures, work.num_parts, bucket - of_texts, of_pictures)
    return Counters()


def _parts(work: Work) -> int:
    return work.num_parts


def _one(work: Work) -> int:
    return 1


STAGES: tuple[Stage, ...] = (
    Stage("clean", _parts, _clean_part),
    Stage("match", lambda work: work.num_parts if work.recipe.matching_model else 0, score_part),
    Stage("pairs", lambda work: sum(_buckets(work)), _write_pairs),
    Stage("select", _one, lambda work, _: select(work)),
    Stage("held_out", lambda work: work.num_parts + len(work.recipe.decontamination.sets), index_held_out),
    Stage("index", _one, lambda work, _: join_index(work)),
    Stage("write", _parts, write_part),
    Stage("finish", _one, lambda work, _: finish(work)),
)


def run_task(folder: Path, name: str, task: int, num_tasks: int, open_scorer: OpenScorer | None = None) -> None:
    """Runs one task of a stage: every ``num_tasks``-th unit, except complete ones.

    Args:
        folder, open_scorer: as in ``Work``.
        name: name of the stage.
        task: index of the task.
        num_tasks: number of tasks of the stage.

    Raises:
        UserError: an earlier stage is incomplete, or a unit failed by a user's mistake. The message names the stage and
            the unit.
    """
    work = Work(folder, open_scorer)
    position = [stage.name for stage in STAGES].index(name)
    for before in STAGES[:position]:
        if missing := work.missing(before.name, before.units(work)):
            shown = ", ".join(map(str, missing[:_NAMED])) + (" and others" if len(missing) > _NAMED else "")
            raise UserError(f'{folder}: stage "{name}" cannot start: of "{before.name}", unit {shown} is not complete')
    stage = STAGES[position]
    for unit in range(task, stage.units(work), num_tasks):
        if not work.is_done(name, unit):
            try:
                counters = stage.run(work, unit)
            except UserError as error:
                raise UserError(f'stage "{name}", unit {unit}: {error}') from None
            except Exception:
                print(f'stage "{name}", unit {unit} of {folder} failed', file=sys.stderr)
                raise
            work.mark_done(name, unit, counters)


def unfinished(work: Work) -> list[Stage]:
    """Returns the stages with incomplete units."""
    return [stage for stage in STAGES if work.missing(stage.name, stage.units(work))]
