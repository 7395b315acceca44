"""Pipelines without a flush between steps: W(t+1) = W(t) - lr u(g(W(t-1))), from stage to stage and step to step."""

import json
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m6.config.run import RunConfig, parse_config
from m6.data.collate import MicroBatch
from m6.runs.processes import start
from m6.training.engine import async_pipeline, norms
from m6.training.engine.async_pipeline import AsyncPipelineRunner
from m6.training.engine.build import build_engine
from m6.training.engine.engine import Engine
from tests.distributed.spawn import run_distributed
from tests.distributed.test_gradient_delay import (
    BAD_STEP,
    STEPS,
    TOLERANCE_FP32,
    _sum_in_float64,
    batches,
    expected_weights,
    largest_error,
    rate,
)
from tests.distributed.test_pipelines import document, folder, part_of_loss, pipeline

pytestmark = pytest.mark.slow

__all__ = ["folder"]  # a fixture

# The largest eps that a step of AdamW still feels makes its update smooth in the gradient.
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "eps": 0.01}}}
DELAY: dict[str, Any] = {"m6__gradient_delay": {"accept_loss": True}, "gradient_clipping": 0.5, **ADAMW}
FLUSHES = {3, STEPS - 1}
"""Steps after which all passes end; the gradients of BAD_STEP are infinite while the next step runs."""


def asynchronous(folder: Path, ranks: int, layers: list[int], stage: int = 1, **changes: Any) -> dict[str, Any]:
    return document(folder, stage, m6__parallel__pipeline=pipeline(ranks, "1f1b", layers), **DELAY | changes)


def loss_of(batch: MicroBatch, output: Any, step: int) -> Tensor:
    return part_of_loss(batch, output) * (1.0 if step != BAD_STEP else float("inf"))


def train_engine(engine: Engine, config: RunConfig, dtype: torch.dtype) -> None:
    """Trains STEPS steps; each but BAD_STEP has its update, at most one step late."""
    dims, steps = engine._mesh.dims, deque[int]()
    for step in range(STEPS):
        engine.begin_step(rate(config, step))
        own = range(dims.dp_rank, dims.dp_rank + 1)
        of_rank = list(batches(config, step, own, dims.dp))
        micro_batches = [replace(batch, pixel_values=batch.pixel_values.to(dtype)) for batch, _ in of_rank]
        engine.accumulate(micro_batches, partial(loss_of, step=step), [seed for _, seed in of_rank])
        steps.append(step)
        updates = [engine.advance()]
        if step in FLUSHES:
            updates.append(engine.update())
        for update in updates:
            if update is not None:
                assert update.skipped == (steps.popleft() == BAD_STEP)
        assert len(steps) == (step not in FLUSHES)
    engine.use_delayed_gradients()


def error_of(each: dict[str, Any], dtype: torch.dtype) -> float:
    """The largest difference to the recurrence in float64 on any rank."""
    config, runtime = parse_config(each), start()
    engine = build_engine(config, runtime)
    runner = engine.runner
    assert isinstance(runner, AsyncPipelineRunner)
    if dtype == torch.float64:
        engine.module.double()
        if runner._copy is not None:
            runner._copy.data = runner._copy.data.double()
        norms._sum_of_squares = _sum_in_float64
    expected = expected_weights(json.dumps(each), engine._mesh.dims.dp)
    train_engine(engine, config, dtype)
    error = torch.tensor(largest_error(engine, expected))
    torch.distributed.all_reduce(error, torch.distributed.ReduceOp.MAX)
    return float(error)


def follow_the_recurrence(documents: list[dict[str, Any]], dtype: torch.dtype, tolerance: float) -> None:
    errors = [error_of(each, dtype) for each in documents]
    assert max(errors) < tolerance, errors


def versions_mixed_up(each: dict[str, Any]) -> None:
    """In-flight backward passes compute with the new weights, or the embedding lacks the gradient of the logits."""
    wrongs: list[tuple[Any, str, Any]] = [
        (async_pipeline, "_in_parameters", lambda _: nullcontext()),
        (AsyncPipelineRunner, "_end_passes", lambda _: None),
    ]
    for owner, name, wrong in wrongs:
        kept = getattr(owner, name)
        setattr(owner, name, wrong)
        assert error_of(each, torch.float32) > 1e-4, name
        setattr(owner, name, kept)
    assert error_of(each, torch.float32) < TOLERANCE_FP32


def test_in_float64(folder: Path):
    """To rounding errors: uneven stages, clipping, dropout, tied embeddings, experts, a step that is skipped."""
    each = asynchronous(folder, 2, [3, 2], stage=0)
    checkpointing = asynchronous(folder, 2, [1, 4], stage=0, m6__training__activation_checkpointing=True)
    run_distributed(follow_the_recurrence, 2, [each, checkpointing], torch.float64, 1e-12)


def test_in_float64_with_as_few_micro_batches_as_stages(folder: Path):
    few = {"train_batch_size": 8, "m6__training__ep_size": 1}
    run_distributed(
        follow_the_recurrence, 4, [asynchronous(folder, 4, [1, 2, 1, 1], stage=0, **few)], torch.float64, 1e-12
    )


def test_with_zero_and_experts_on_two_ranks(folder: Path):
    documents = [asynchronous(folder, 2, [3, 2], stage, m6__training__ep_size=2) for stage in (0, 1)]
    run_distributed(follow_the_recurrence, 4, documents, torch.float32, TOLERANCE_FP32)


def test_versions_that_are_mixed_up_fail(folder: Path):
    run_distributed(versions_mixed_up, 2, asynchronous(folder, 2, [3, 2]))
