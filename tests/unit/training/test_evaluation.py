"""Validation during training, against every source by itself."""

import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from m6.data.collate import MicroBatch
from m6.data.manifest import Manifest, Origin, SourceEntry, SplitEntry
from m6.data.objectives import OBJECTIVES
from m6.data.shards import ShardWriter
from m6.model.outputs import M6Output
from m6.training.evaluation import evaluate
from m6.training.loop import Trainer
from tests.fixtures.tiny_data import build_tiny_data

ALL = 100
TEXTS = {"weather": "今天下雨。明天也下雨。", "animals": "熊猫吃竹子。猫不吃竹子，猫吃鱼。"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data, and two more sources of texts with 7 and 14 rows for validation."""
    folder = build_tiny_data(tmp_path_factory.mktemp("sources") / "data")
    entries = dict(Manifest.load(folder).sources)
    for number, (name, text) in enumerate(TEXTS.items(), start=1):
        splits = {}
        for split in ("train", "validation"):
            with ShardWriter(folder, split, name) as writer:
                for row in range(7 * number):
                    key = f"{split}-{row}"
                    writer.write({"id": key, "group": key, "source": name, "text": text[: 4 + row]})
            splits[split] = SplitEntry.of(writer.shards)
        origin = [Origin(package="tests", version="1", licence="MIT")]
        entries[name] = SourceEntry(kind="text", licence="MIT", origin=origin, splits=splits)
    Manifest(sources=entries).save(folder)
    return folder


def losses(trainer: Trainer) -> dict[str, dict]:
    return evaluate(trainer.engine, trainer.data, ALL, trainer.dims, trainer.runtime)


def test_validation_does_not_depend_on_the_micro_batch(make_trainer: Callable[..., Trainer], tmp_path: Path):
    """The same weights on the same rows: fp32 in other orders."""
    changes = {"m6__model__hidden_dropout": 0.0, "m6__evaluation__num_rows": 6}

    def validate(size: int) -> dict[str, float]:
        trainer = make_trainer(f"micro_batch_{size}", train_micro_batch_size_per_gpu=size, **changes)
        settings = trainer.settings.evaluation
        assert settings.num_rows == 6
        return evaluate(trainer.engine, trainer.data, settings.num_rows, trainer.dims, trainer.runtime)["validation"]

    expected = validate(1)
    assert len(expected) == 4
    for size in (2, 4, 8):
        assert validate(size) == pytest.approx(expected, rel=1e-6)


def test_losses_of_sources_are_those_of_a_run_with_this_source_alone(make_trainer: Callable[..., Trainer], data: Path):
    objectives = {"image_captioning": {"weight": 1.0}, "language_modelling": {"weight": 1.0}}
    objectives |= {name: {"weight": 0.0} for name in ("text_denoising", "image_text_denoising")}

    def run(name: str, *sources: str) -> dict[str, dict]:
        weights = dict.fromkeys([*sources, "tiny_shapes"], 1.0)
        changes = {"m6__data__path": str(data), "m6__data__sources": weights, "m6__objectives": objectives}
        return losses(make_trainer(name, **changes))

    alone = {name: run(name, name)["validation"] for name in TEXTS}
    both = run("both", *TEXTS)
    # fp32 in rows of other lengths.
    expected = {name: pytest.approx(each["language_modelling"], rel=1e-5) for name, each in alone.items()}
    captions = {"tiny_shapes": both["validation"]["image_captioning"]}
    assert both["validation_by_source"] == {"language_modelling": expected, "image_captioning": captions}
    least, most = sorted(both["validation_by_source"]["language_modelling"].values())
    assert least < both["validation"]["language_modelling"] < most
    assert both["validation"]["image_captioning"] == pytest.approx(alone["weather"]["image_captioning"], rel=1e-5)


def test_losses_that_are_not_finite_are_told_with_their_rank(
    make_trainer: Callable[..., Trainer], capfd: pytest.CaptureFixture[str]
):
    trainer = make_trainer()
    forward = trainer.engine.forward

    def overflows(batch: MicroBatch) -> M6Output:
        output = forward(batch)
        if OBJECTIVES[int(batch.objective_ids.max())] == "language_modelling":
            assert output.target_losses is not None
            output.target_losses[-1] = float("inf")
        return output

    with mock.patch.object(trainer.engine, "forward", overflows):
        found = losses(trainer)["validation"]
    assert [name for name, loss in found.items() if not math.isfinite(loss)] == ["language_modelling"]
    rank = trainer.runtime.name_of(0)
    assert f"warning: validation: not finite on {rank}: loss of language_modelling\n" in capfd.readouterr().err
