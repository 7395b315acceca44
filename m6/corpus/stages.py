"""The stages of a corpus in order, and their units. Tasks share the units of a stage.

clean      a part      read, check, normalise, filter; signatures of texts, keys of images
match      a part      score captions against their images by a trained model
pairs      a bucket    texts with equal signatures; images with matching keys and similar thumbnails
select     one         clusters, and the kept document of each
held_out   a part      n-grams of validation and test documents, and of the named sets
index      one         all of these together
write      a part      decontaminate, cut to passages, write shards
finish     one         manifest, record, the name of the data folder
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from m6.corpus.cleaning import clean_part, clean_pictures
from m6.corpus.counters import Counters
from m6.corpus.output import finish, index_held_out, join_index, write_part
from m6.corpus.picture_copies import write_picture_pairs
from m6.corpus.selection import select
from m6.corpus.text_copies import open_many_files, write_pairs
from m6.corpus.work import OpenScorer, Work, score_part
from m6.errors import UserError

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
