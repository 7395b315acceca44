"""First stage: the documents of a part are read, checked, normalised, cleaned and filtered, and get a signature."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from m6.data.checking import check_row
from m6.data.corpus.boilerplate import remove_boilerplate
from m6.data.corpus.characters import compared_form, digest, stored_form, without_marks
from m6.data.corpus.documents import DocumentWriter
from m6.data.corpus.minhash import write_signatures
from m6.data.corpus.personal import mask_personal_data
from m6.data.corpus.quality import problem_of
from m6.data.corpus.reading import read_part
from m6.data.corpus.recipe import CorpusRecipe, FilterSettings
from m6.data.corpus.tally import Tally
from m6.data.corpus.work import Work
from m6.data.sources.base import Row
from m6.data.sources.local import group_of_text


def clean_part(work: Work, part: int) -> Tally:
    """Writes the documents of a part that pass, and their signatures; returns what was removed and changed."""
    recipe, planned = work.recipe, work.plan.parts[part]
    filters = recipe.input(planned.input).filters or recipe.filters
    tally = Tally()

    with DocumentWriter(work.documents(part)) as writer:

        def letters_of_kept() -> Iterator[str]:
            for row in read_part(recipe, work.plan, planned, work.fetched(part)):
                if (cleaned := _clean(row, recipe, filters, tally)) is not None:
                    compared = compared_form(cleaned.text)
                    order = digest(f"{cleaned.text}\n{cleaned.id}")
                    writer.write(cleaned, digest(compared), order, len(cleaned.text))
                    yield without_marks(compared)

        # The signatures take the documents one by one: document n of the file has signature n.
        write_signatures(letters_of_kept(), work.folder / "signatures", part, recipe.near_duplicates)
    return tally


def _clean(row: Row, recipe: CorpusRecipe, filters: FilterSettings, tally: Tally) -> Row | None:
    """Returns a document in its stored form, or None if it was removed."""
    tally.documents += 1
    row, problem = check_row(row, "text", max_chars=recipe.document_chars)
    if problem is not None:
        tally.remove("read", problem, row.id, row.text)
        return None
    tally.characters += len(row.text)
    tally.count("read", row.text)
    text = stored_form(row.text, recipe.to_simplified)
    if recipe.remove_boilerplate:
        text, lines = remove_boilerplate(text)
        tally.changed["boilerplate lines"] += lines
    if recipe.mask_personal_data:
        text, masked = mask_personal_data(text)
        tally.changed.update(masked)
    if problem := problem_of(text, filters):
        tally.remove("filter", problem, row.id, text)
        return None
    # Boilerplate lines may have been all that made two documents differ.
    return replace(row, text=text, group=row.group or group_of_text(text))
