"""``m6.gradient_delay``: the weights are those of the recurrence W(t+1) = W(t) - lr u(g(W(t-1)))."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m6.checkpoints.fragment import WEIGHT
from m6.config.run import RunConfig, parse_config
from m6.data.collate import MicroBatch
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.training.engine import clipping
from m6.training.engine.build import build_engine, build_model
from m6.training.engine.engine import Engine
from m6.training.engine.late_gradients import LateGradients
from m6.training.engine.optimizer import build_optimizer
from tests.distributed.spawn import run_distributed
from tests.distributed.test_training_layouts import layout

STEPS = 6
RATES = [0.02 / (1 + step) for step in range(STEPS)]
"""One for each step, so that a gradient that is used with the rate of another step is seen."""
BAD_STEP = 2
"""The step whose gradients are infinite."""
DELAY: dict[str, Any] = {"m6__gradient_delay": {"accept_loss": True}, "gradient_clipping": 0.5}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}},
    "Adafactor": {
        "optimizer": {"type": "Adafactor", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "m6__gradient_delay": {},
    },
    "Muon": {
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adamw_lr": 0.01, "weight_decay": 0.1}},
        "m6__gradient_delay": {},
    },
    # Its update is linear in the gradient but for the norm of a tensor, so errors of fp32 stay small.
    "Lars": {"optimizer": {"type": "Lars", "params": {"lr": 0.5, "weight_decay": 0.01, "momentum": 0.9}}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("delay")


def loss_of(batch: MicroBatch, output: Any, step: int, scale: float) -> Tensor:
    """The part of a micro-batch; most of the gradients' norms are above the largest that clipping lets pass."""
    loss = (output.target_losses.sum() / 100 + output.aux_loss) * scale
    return loss * math.inf if step == BAD_STEP else loss


def batches(config: RunConfig, step: int, ranks: range, world_size: int) -> Iterator[tuple[MicroBatch, int]]:
    """The micro-batches of these ranks in a step, and their seeds."""
    data, each = open_data(config), config.deepspeed.accumulation_steps(world_size)
    for rank in ranks:
        for index in range(each):
            number = (step * world_size + rank) * each + index
            yield data.micro_batch(number), number


def recurrence(config: RunConfig, world_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """W(STEPS), written down: two versions of the weights, and PyTorch's autograd on one process."""
    model, _ = build_model(config, torch.device("cpu"))
    model.to(dtype).train()
    now, optimizer = model, build_optimizer(model, config.deepspeed, 1)
    before = copy.deepcopy(now)  # W(t-1) of step t; in step 0 it is W(0), too
    for step in range(STEPS):
        before.zero_grad()
        for batch, seed in batches(config, step, range(world_size), world_size):
            batch = replace(batch, pixel_values=batch.pixel_values.to(dtype))
            output = before(**batch.model_inputs(), labels=batch.labels, return_logits=False, dropout_seed=seed)
            loss_of(batch, output, step, 1.0).backward()
        gradients = [parameter.grad for parameter in before.parameters()]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        before.load_state_dict(now.state_dict())
        if not math.isfinite(norm):
            continue
        largest = config.deepspeed.gradient_clipping
        factor = largest / (norm + 1e-6) if norm > largest else 1.0
        for parameter, gradient in zip(now.parameters(), gradients, strict=True):
            parameter.grad = gradient * factor
        for group in optimizer.param_groups:
            group["lr"] = RATES[step] * group.get("lr_ratio", 1.0)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in now.named_parameters()}


def train_engine(engine: Engine, config: RunConfig, rank: int, world_size: int, dtype: torch.dtype) -> None:
    for step in range(STEPS):
        engine.begin_step(RATES[step])
        of_rank = list(batches(config, step, range(rank, rank + 1), world_size))
        micro_batches = [replace(batch, pixel_values=batch.pixel_values.to(dtype)) for batch, _ in of_rank]
        scale = float(engine.averaged_over)
        engine.accumulate(
            micro_batches, lambda batch, output, step=step: loss_of(batch, output, step, scale), [s for _, s in of_rank]
        )
        assert engine.update().skipped == (step == BAD_STEP)
    engine.use_late_gradients()


def largest_error(engine: Engine, expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight on this rank."""
    errors = []
    for fragment in engine.fragments():
        if fragment.kind == WEIGHT and fragment.name in expected:
            part = expected[fragment.name].reshape(-1)[fragment.offset : fragment.end]
            errors.append(float((part.double() - fragment.data.double()).abs().max()))
        assert fragment.kind != "late_gradient"
    assert errors
    return max(errors)


def _sum_in_float64(gradients: list[Tensor], device: torch.device) -> Tensor:
    return sum((gradient.square().sum() for gradient in gradients), torch.zeros((), dtype=torch.float64))


def follows_the_recurrence(document: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    config, runtime = parse_config(document), start()
    engine = build_engine(config, runtime)
    if dtype == torch.float64:
        engine.module.double()
        clipping._sum_of_squares = _sum_in_float64
    expected = recurrence(config, runtime.world_size, torch.float64)
    train_engine(engine, config, runtime.rank, runtime.world_size, dtype)
    error = largest_error(engine, expected)
    print("error", error)
    assert error < tolerance


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_float64_on_one_rank(folder: Path, optimizer: str):
    """To rounding errors: clipping, dropout, tied embeddings, experts, and a step that is skipped included."""
    document = layout(folder, 1, 0, 1, **DELAY | OPTIMIZERS[optimizer])
    run_distributed(follows_the_recurrence, 1, document, torch.float64, 1e-12)
