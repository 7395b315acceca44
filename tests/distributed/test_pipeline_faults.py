"""Stages of a pipeline whose gradients are not finite: all skip the step, and messages name the stage."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.spawn import run_distributed
from tests.distributed.test_faults import open_trainer
from tests.distributed.test_pipelines import document, folder, pipeline

pytestmark = pytest.mark.slow

__all__ = ["folder"]  # a fixture


def poison(each: dict[str, Any], root: Path) -> None:
    """A router of the last stage overflows in the second step."""
    trainer = open_trainer(each, root)
    last = trainer.engine.module.model.layers[4]
    run_step, outcomes = trainer.run_step, []

    def poisoned(micro_batches: list[Any]) -> Any:
        weights = [fragment.data.clone() for fragment in trainer.engine.fragments()]
        if trainer.step == 1 and hasattr(last, "ffn"):
            kept = last.ffn.router.weight.data.clone()
            last.ffn.router.weight.data.fill_(math.inf)
        [outcome] = run_step(micro_batches)
        if trainer.step == 1 and hasattr(last, "ffn"):
            last.ffn.router.weight.data.copy_(kept)
        same = [torch.equal(old, new.data) for old, new in zip(weights, trainer.engine.fragments(), strict=True)]
        outcomes.append((outcome.skipped, outcome.nonfinite_routers, all(same)))
        return [outcome]

    trainer.run_step = poisoned
    trainer.train()
    assert outcomes[1] == (True, ["layers.4.ffn"], True)
    assert [skipped for skipped, _, _ in outcomes] == [False, True, False]


def fault_of_a_stage(each: dict[str, Any], root: Path) -> None:
    """From the second step on the gradients of the last stage alone are not finite; FATAL after the third."""
    from m6.errors import UserError

    with (root.parent / f"stderr_{os.environ['RANK']}").open("w") as log:
        os.dup2(log.fileno(), 2)
        trainer = open_trainer(each, root)
    accumulate = trainer.engine.accumulate

    def poisoned(*arguments: Any) -> None:
        accumulate(*arguments)
        if trainer.step > 0 and trainer.runtime.rank == 1:
            trainer.engine.module.model.layers[4].attention.qkv.weight.grad.fill_(math.nan)

    trainer.engine.accumulate = poisoned
    with pytest.raises(UserError, match=r"gradients are not finite in stage 1, layers 3-4; batches in"):
        trainer.train()


def faults(each: dict[str, Any], folder: Path) -> None:
    poison(each, folder / "poisoned")
    each["m6"]["training"]["max_skipped_steps"] = 1
    fault_of_a_stage(each, folder / "fatal")


def test_all_stages_skip_a_step_and_messages_name_the_stage(folder: Path):
    """A step that is skipped names its router; FATAL and the logs of ranks name the stages and their layers."""
    each = document(folder, m6__parallel__pipeline=pipeline(2, "1f1b", [3, 2]))
    (folder / "faults").mkdir()
    run_distributed(faults, 2, each, folder / "faults")
    assert "gradients are not finite in stage 1, layers 3-4" in (folder / "faults" / "fatal" / "FATAL").read_text()
    for rank, place in enumerate(("stage 0, layers 0-2", "stage 1, layers 3-4")):
        said = (folder / "faults" / f"stderr_{rank}").read_text()
        assert f"place: rank {rank}, pipeline 0, {place}\n" in said
