"""First stage: reads, checks, cleans and filters the documents of a part, and writes their signatures.

Texts are normalised. Images are decoded, shrunk and filtered together with their captions, and get keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from PIL import Image

from m6.corpus.counters import Counters
from m6.corpus.picture_copies import PictureWriter
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
from m6.corpus.text_copies import write_signatures
from m6.corpus.work import DocumentWriter, Work
from m6.data.build import check_row
from m6.data.sources.base import Row, count_unread
from m6.data.sources.local import group_of_text
from m6.data.sources.pictures import BadPicture, Decoded, decode, on_white, square


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
