"""Rows that belong together are in one split."""

import collections
import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m6.data.manifest import Split
from m6.data.overlap import has_near_duplicate, join_near_duplicates, signature
from m6.data.sources import Row
from m6.data.splitting import Grouping, SplitRules, split_rows

RULES = SplitRules(0.3, 0.3)


def photograph(number: int) -> Image.Image:
    """A picture with large and small structure, as photographs have."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((96, 96), Image.Resampling.BICUBIC)
    fine = rng.normal(0, 12, (96, 96, 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + fine, 0, 255).astype(np.uint8))


def stored(image: Image.Image, kind: str = "PNG", **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def place(rows: list[Row], folder: Path, rules: SplitRules = RULES) -> tuple[dict[str, tuple[str, Split]], Grouping]:
    grouping = Grouping()
    placed = {}
    for row, split in split_rows(rows, "mine", folder / "spool", rules, grouping):
        assert row.group is not None
        placed[row.id] = (row.group, split)
    return placed, grouping


def test_no_caption_and_no_picture_is_in_two_splits(tmp_path: Path):
    """A chain of rows, each of which shares its caption with one and its picture with another, is one group."""
    rng = np.random.default_rng(0)
    rows = [
        Row(str(number), None, f"caption {rng.integers(60)}", stored(photograph(int(rng.integers(60)))))
        for number in range(120)
    ]
    placed, grouping = place(rows, tmp_path)
    assert len(placed) == 120
    assert grouping.rows == 120
    assert len({split for _, split in placed.values()}) == 3
    for key in ("text", "image"):
        splits = collections.defaultdict(set)
        for row in rows:
            splits[getattr(row, key)].add(placed[row.id])
        assert all(len(places) == 1 for places in splits.values())
    assert grouping.groups == len({group for group, _ in placed.values()})


@pytest.mark.parametrize(
    "change",
    [
        lambda image: stored(image, "JPEG", quality=30),
        lambda image: stored(image, "WEBP", quality=60),
        lambda image: stored(image.resize((48, 48), Image.Resampling.LANCZOS)),
        lambda image: stored(image.resize((192, 192), Image.Resampling.BICUBIC)),
    ],
    ids=["jpeg", "webp", "half", "twice"],
)
def test_a_picture_that_was_stored_again_is_found(change: object, tmp_path: Path):
    images = [photograph(number) for number in range(20)]
    pictures = [stored(image) for image in images] + [change(image) for image in images]  # type: ignore[operator]
    signatures = np.stack([signature(picture) for picture in pictures])
    assert join_near_duplicates(signatures, np.arange(40)).tolist() == [*range(20), *range(20)]


def test_a_small_object_makes_another_picture():
    first = photograph(0)
    second = first.copy()
    second.paste((255, 0, 0), (40, 40, 52, 52))
    assert not has_near_duplicate(signature(stored(first))[None], signature(stored(second))[None])


def test_labels_are_in_every_split(tmp_path: Path):
    rows = [Row(str(n), None, "cat", stored(photograph(n)), answer="cat") for n in range(40)]
    placed, grouping = place(rows, tmp_path)
    assert grouping.groups == 40
    assert len({split for _, split in placed.values()}) == 3


def test_groups_do_not_depend_on_names_of_files(tmp_path: Path):
    rows = [Row(str(n), None, f"caption {n}", stored(photograph(n))) for n in range(10)]
    renamed = [dataclasses.replace(row, id=f"other/{row.id}") for row in rows]
    first, _ = place(rows, tmp_path / "a")
    second, _ = place(renamed, tmp_path / "b")
    assert list(first.values()) == list(second.values())


def test_own_splits_stay(tmp_path: Path):
    pictures = [stored(photograph(n)) for n in range(8)]
    rows = [Row(f"train {n}", None, f"caption {n}", pictures[n], split="train") for n in range(4)]
    rows += [Row(f"test {n}", None, f"test {n}", pictures[n + 2], split="test") for n in range(4)]
    rows += [Row("free", None, "free", pictures[5])]
    placed, _ = place(rows, tmp_path, SplitRules(0.0, 0.5, frozenset({"train", "test"})))
    assert all(split == identity.split()[0] for identity, (_, split) in placed.items() if identity != "free")
    assert placed["free"][1] == "test"  # its picture is in the test split


@pytest.mark.parametrize("has_groups", [True, False])
def test_rows_without_a_split_follow_their_group(has_groups: bool, tmp_path: Path):
    """They come before, between and after the rows with a split; groups are given, or those of equal captions."""
    groups = [f"group {number}" for number in range(30)]
    named: dict[str, Split] = {group: ("test", "validation", "train")[n % 3] for n, group in enumerate(groups)}
    rows = [Row(f"{group} own", group, split=split) for group, split in named.items()]
    rows += [Row(f"{group} free {n}", group) for n in range(2) for group in groups]
    rows += [
        Row(f"{group} train", group, split="train") for group in groups[:2]
    ]  # own splits stay, whatever they share
    rows += [Row(f"free {n}", f"free {n}") for n in range(30)]
    np.random.default_rng(0).shuffle(rows)
    if not has_groups:
        rows = [
            dataclasses.replace(row, group=None, text=row.group, image=stored(photograph(number)))
            for number, row in enumerate(rows)
        ]
    placed, _ = place(rows, tmp_path, SplitRules(0.5, 0.5, frozenset(named.values())))
    assert len(placed) == len(rows)
    assert all(placed[f"{group} free {n}"][1] == split for group, split in named.items() for n in range(2))
    assert all(placed[f"{group} train"][1] == "train" for group in groups[:2])
    assert {placed[f"free {n}"][1] for n in range(30)} == {"train", "validation"}


def test_training_rows_give_a_validation_split_where_there_is_none():
    groups = [str(number) for number in range(200)]
    own = SplitRules(0.3, 0.3, frozenset({"train", "test"}))
    assert {own.split(group, "train") for group in groups} == {"train", "validation"}
    assert {own.split(group, "test") for group in groups} == {"test"}
    assert {SplitRules(0.3, 0.3, frozenset({"train", "validation"})).split(group, "train") for group in groups} == {
        "train"
    }
    assert {RULES.split(group, None) for group in groups} == {"train", "validation", "test"}


def test_rows_with_a_group_do_not_wait(tmp_path: Path):
    def rows():
        yield Row("a", "one", "text")
        raise AssertionError("the first row was not passed on")

    assert next(iter(split_rows(rows(), "mine", tmp_path, RULES, Grouping())))[0].id == "a"
