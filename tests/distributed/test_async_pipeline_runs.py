"""Runs of pipelines without a flush: what they report, where they stop, what they save, and how they fail."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m6.checkpoints.discovery import complete_checkpoints
from m6.errors import UserError
from tests.distributed.alike import TOLERANCE, assert_reports_alike, assert_rounded_alike, reported, state_errors
from tests.distributed.chosen import cases, chosen
from tests.distributed.spawn import run_distributed
from tests.distributed.test_faults import entries, open_trainer
from tests.distributed.test_pipelines import document, folder, pipeline, train_all
from tests.distributed.test_training_layouts import MUON, losses, norms, train

pytestmark = pytest.mark.slow

__all__ = ["folder"]  # a fixture

# All passes end after steps 4 and 7 alone.
DELAY: dict[str, Any] = {
    "m6__gradient_delay": {"accept_loss": True},
    "m6__training__total_steps": 7,
    "m6__logging__interval_steps": 4,
    "m6__evaluation__interval_steps": 7,
    "m6__checkpoint__interval_steps": 7,
}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "two stages": ({}, pipeline(2, "1f1b", [3, 2]), 1, 2),
    "four stages": ({"train_batch_size": 8}, pipeline(4, "1f1b", [1, 2, 1, 1]), 1, 1),
    "stage 0, checkpointing": ({"m6__training__activation_checkpointing": True}, pipeline(4, "1f1b"), 0, 1),
    "pseudo": ({"m6__pseudo_to_real": {"switch_step": 3, "num_groups": 2}}, pipeline(2, "1f1b", [3, 2]), 1, 2),
    "muon": ({**MUON, "m6__gradient_delay": {}}, pipeline(2, "1f1b", [4, 1]), 1, 1),
    # Passes of two steps with different numbers of micro-batches are under way.
    "a batch that grows": (
        {
            "train_batch_size": 24,
            "m6__training__batch_ramp": [{"steps": 2, "batch_size": 8}, {"steps": 3, "batch_size": 16}],
        },
        pipeline(2, "1f1b", [3, 2]),
        1,
        2,
    ),
    "bf16": ({"bf16": {"enabled": True}}, pipeline(2, "1f1b"), 1, 2),
}


def asynchronous(folder: Path, stages: dict[str, Any] | None, zero: int = 1, ep_size: int = 1, **changes: Any) -> Any:
    parallel = {"m6__parallel__pipeline": stages, "m6__training__ep_size": ep_size}
    return document(folder, zero, **DELAY | parallel | changes)


# Parts of the others together.
NIGHTLY = {"four stages", "muon", "bf16"}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The folder with a run of one rank and a run of four ranks for each of the above that is chosen."""
    alone, together, names = [], [], chosen(request)
    for name, (changes, stages, zero, ep_size) in RUNS.items():
        if name not in names:
            continue
        alone.append((asynchronous(folder, None, 1 if name == "bf16" else 0, **changes), folder / f"{name} alone"))
        together.append((asynchronous(folder, stages, zero, ep_size, **changes), folder / name))
    run_distributed(train_all, 1, alone)
    run_distributed(train_all, 4, together)
    return folder


@pytest.mark.parametrize("name", cases(RUNS, NIGHTLY))
def test_a_run_reports_what_one_rank_with_the_delay_reports(trained: Path, name: str):
    found, expected = trained / name, trained / f"{name} alone"
    if name == "bf16":
        assert_rounded_alike(found, expected)
        return
    lines = [3, 4, 7] if name == "pseudo" else [4, 7]  # one more for the switch
    assert [entry["step"] for entry in entries(found) if "loss" in entry] == lines
    assert_reports_alike(found, expected, len(lines) + 4)  # validation of four objectives
    for ours, theirs in zip(*(reported(root, "aux_loss") for root in (found, expected)), strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    for key, error in state_errors(found, expected).items():
        # AdamW divides by the root of squares: where a gradient is nearly 0, rounding decides the sign of the update.
        assert error < (2e-3 if key[1] == "weight" or name == "muon" else 1e-5), key


def test_a_run_resumes_on_other_layouts(folder: Path):
    """The gradients that wait are those of a run without a pipeline; it stops where a flush was not due."""
    root, last = folder / "wandering", {"m6__logging__interval_steps": 1}
    run_distributed(train, 1, asynchronous(folder, None, 0, **last), str(folder / "straight"))
    for ranks, stages, zero, ep_size, stop_at in [
        (4, pipeline(2, "1f1b", [1, 4]), 1, 2, 3),
        (1, None, 0, 1, 4),
        (4, pipeline(4, "1f1b"), 0, 1, 5),
        (2, None, 2, 2, 6),
        (2, pipeline(2, "1f1b"), 1, 1, None),
    ]:
        run_distributed(train, ranks, asynchronous(folder, stages, zero, ep_size), str(root), stop_at)
    mean = sum(losses(folder / "straight")[:3]) / 3
    expected = [mean, *losses(folder / "straight")[3:]]
    assert losses(root) == pytest.approx(expected, rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(folder / "straight")[2:], rel=10 * TOLERANCE)


def test_a_run_resumes_to_the_bit_on_the_same_layout(folder: Path):
    """A flush where the run stops changes no sum."""
    each = asynchronous(folder, pipeline(2, "1f1b", [3, 2]))
    run_distributed(train, 2, each, str(folder / "unstopped"))
    for stop_at in (2, 5, None):
        run_distributed(train, 2, each, str(folder / "stopped"), stop_at)
    assert set(state_errors(folder / "stopped", folder / "unstopped").values()) == {0.0}


def stop_and_save(each: dict[str, Any], root: Path) -> None:
    """A request during a step is heard with the sums of the step, which the next step reads: it then ends, too."""
    trainer = open_trainer(each, root)
    run_step = trainer.run_step

    def requesting(micro_batches: list[Any]) -> Any:
        if trainer.step == 1 and trainer.runtime.is_main:
            (root / "STOP").touch()
        outcomes = run_step(micro_batches)
        assert [outcome.step for outcome in outcomes] == [[], [1], [2, 3]][trainer.step]
        return outcomes

    trainer.run_step = requesting
    assert trainer.train() is False
    assert trainer.step == 3


def test_a_request_to_stop_ends_all_passes(folder: Path):
    each, root = asynchronous(folder, pipeline(2, "1f1b")), folder / "asked"
    run_distributed(stop_and_save, 2, each, root)
    assert [path.name for path in complete_checkpoints(root / "checkpoints")] == ["step_00000003"]
    (root / "STOP").unlink()
    run_distributed(train, 2, each, str(root))
    run_distributed(train, 1, asynchronous(folder, None, 0, m6__logging__interval_steps=1), str(folder / "unasked"))
    assert losses(root)[-4:] == pytest.approx(losses(folder / "unasked")[-4:], rel=TOLERANCE)


def fail(each: dict[str, Any], root: Path) -> None:
    """From the third step on a router of the last stage overflows."""
    trainer = open_trainer(each, root)
    last, run_step, batches = trainer.engine.module.model.layers[4], trainer.run_step, []

    def recorded(micro_batches: list[Any]) -> Any:
        batches.append(micro_batches)
        return run_step(micro_batches)

    if hasattr(last, "ffn"):
        last.ffn.router.register_forward_pre_hook(
            lambda _, inputs: (inputs[0] * math.inf, *inputs[1:]) if trainer.step >= 2 else None
        )
    trainer.run_step = recorded
    with pytest.raises(UserError, match=r"step 4: .* 2 steps in a row .*router logits are not finite in layers.4.ffn"):
        trainer.train()
    if trainer.runtime.rank == 1:
        saved = sorted((root / "nonfinite").glob("step_00000004_rank_00001_*"))
        assert len(saved) == len(batches[3])
        for path, batch in zip(saved, batches[3], strict=True):
            assert torch.equal(load_file(path)["input_ids"], batch.input_ids)


def test_a_run_that_fails_names_the_step_and_saves_its_batches(folder: Path):
    each = asynchronous(folder, pipeline(2, "1f1b", [3, 2]), m6__training__max_skipped_steps=1)
    each["m6"]["logging"]["interval_steps"] = 7
    run_distributed(fail, 2, each, folder / "failed")
    assert "step 4: " in (folder / "failed" / "FATAL").read_text()
