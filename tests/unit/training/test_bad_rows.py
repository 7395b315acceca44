"""Rows that cannot be used, seen from a run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from m6.data.manifest import Manifest, Origin, SourceEntry, SplitEntry
from m6.data.shards import ShardWriter
from m6.errors import UserError
from m6.training.loop import Trainer

TEXT_ALONE = {
    "text_denoising": {"weight": 1},
    "language_modelling": {"weight": 1},
    "image_captioning": {"weight": 0},
    "image_text_denoising": {"weight": 0},
}


def build_texts(folder: Path, texts: list[str]) -> Path:
    """A data folder with one source of texts, the same for training and validation."""
    splits = {}
    for split in ("train", "validation"):
        with ShardWriter(folder, split, "texts") as writer:
            for number, text in enumerate(texts):
                writer.write({"id": f"{number}", "group": f"{number}", "source": "texts", "text": text})
        splits[split] = SplitEntry.of(writer.shards)
    origin = Origin(package="tests", version="1", licence="Apache-2.0")
    entry = SourceEntry(kind="text", licence="Apache-2.0", origin=[origin], splits=splits)
    Manifest(sources={"texts": entry}).save(folder)
    return folder


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_source_without_a_usable_row(make_trainer: Callable[..., Trainer], tmp_path: Path, num_workers: int):
    data = build_texts(tmp_path / "data", [" "] * 5)
    changes = {"m6__data__path": str(data), "m6__data__num_workers": num_workers, "m6__objectives": TEXT_ALONE}
    trainer = make_trainer(**changes)
    with pytest.raises(UserError, match=r'source "texts" has no usable row; the last: .*empty text'):
        trainer.train()
    assert not trainer.run.checkpoints.exists()
    assert not trainer.run.metrics.exists()


def test_too_many_rows_that_cannot_be_used(make_trainer: Callable[..., Trainer], tmp_path: Path):
    data = build_texts(tmp_path / "data", [" ", "今天早上小明在公园里看书。", "昨天老师在学校画画。", "\t"])
    changes = {"m6__data__path": str(data), "m6__objectives": TEXT_ALONE, "m6__data__max_bad_row_share": 0.0}
    with pytest.raises(
        UserError, match=r"bad rows in \d+ samples exceed m6.data.max_bad_row_share 0.0; the last: texts:"
    ):
        make_trainer("strict", **changes).train()
    trainer = make_trainer("lenient", **{**changes, "m6__data__max_bad_row_share": 1.0})
    trainer.train()
    listed = (trainer.run.root / "bad_rows_rank_00000.txt").read_text().splitlines()
    assert listed
    assert all("empty text" in line for line in listed)
    assert sum(entry["bad_rows"] for entry in trainer.run.read_metrics() if "loss" in entry) == len(listed)
