"""``m6.gradient_delay``: the weights are those of the recurrence W(t+1) = W(t) - lr u(g(W(t-1)))."""

import copy
import functools
import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from m6.checkpoints.comparison import compare, open_step
from m6.checkpoints.format import LATE_GRADIENT, LATE_UPDATE, WEIGHT, CheckpointReader
from m6.config.run import RunConfig, parse_config
from m6.data.collate import MicroBatch
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.training.engine import norms
from m6.training.engine.build import build_engine, build_model
from m6.training.engine.engine import Engine
from m6.training.engine.optimizer import build_optimizer
from m6.training.engine.updater import DelayedGradients
from offload.runtime.updates import Updates
from tests.distributed.chosen import cases
from tests.distributed.spawn import run_distributed
from tests.distributed.test_any_world import train_in_any_precision
from tests.distributed.test_training_layouts import TOLERANCE, layout, losses
from tests.fixtures.plans import predicted_checkpoint

pytestmark = pytest.mark.slow

STEPS = 6
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
    "Lars": {"optimizer": {"type": "Lars", "params": {"lr": 0.05, "trust_coefficient": 1.0, "momentum": 0.5}}},
}

OFFLOAD: dict[str, Any] = {
    "device_budget_mib": 5000.0,
    "chunk_mib": 0.001,
    "rules": [{"kind": "expert", "place": "stream"}],
    "optimizer": {"type": "SGD", "lr": 0.3, "momentum": 0.9},
}


OFFLOADED: dict[str, Any] = {"m6__offload": OFFLOAD, "train_micro_batch_size_per_gpu": 4}
LARS = OPTIMIZERS["Lars"]
TOLERANCE_FP32 = 3e-7
"""The largest weights are near 1, where two units in the last place are 2.4e-7."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("delay")


def rate(config: RunConfig, step: int) -> float:
    """One for each step, so that a gradient that is used with the rate of another step is seen."""
    peak: float = config.deepspeed.optimizer_params["lr"]
    return peak / (1 + step)


def loss_of(_: MicroBatch, output: Any, step: int, scale: float) -> Tensor:
    """The part of a micro-batch; most of the gradients' norms are above the largest that clipping lets pass."""
    loss = (output.target_losses.sum() / 100 + output.aux_loss) * scale
    return loss * math.inf if step == BAD_STEP else loss


def batches(config: RunConfig, step: int, ranks: range, world_size: int) -> Iterator[tuple[MicroBatch, int]]:
    """The micro-batches of these ranks in a step, and their seeds."""
    data, each = open_data(config), config.accumulation_steps(world_size * config.pipeline_size)
    for rank in ranks:
        for index in range(each):
            number = (step * world_size + rank) * each + index
            yield data.micro_batch(number), number


def recurrence(config: RunConfig, world_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """W(STEPS), written down: two versions of the weights, and PyTorch's autograd on one process."""
    offloaded = config.m6.offload is not None
    training = config.m6.training.model_copy(update={"ep_size": 1})
    config = replace(config, m6=config.m6.model_copy(update={"offload": None, "training": training}))
    model, _ = build_model(config, torch.device("cpu"))
    model.to(dtype).train()
    now, optimizer = model, build_optimizer(model, config.deepspeed)
    experts = {name: each for name, each in now.named_parameters() if ".experts." in name}
    of_experts = torch.optim.SGD(experts.values(), momentum=0.9)
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
            group["lr"] = rate(config, step) * group.get("lr_ratio", 1.0)
        if offloaded:
            of_experts.param_groups[0]["lr"] = rate(config, step) * OFFLOAD["optimizer"]["lr"] / rate(config, 0)
            of_experts.step()
            of_experts.zero_grad()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in now.named_parameters()}


@functools.cache
def expected_weights(document: str, world_size: int) -> dict[str, Tensor]:
    """The recurrence of a run's JSON in float64: one rank computes it for all, once for all cases of the run."""
    config = parse_config(json.loads(document))
    found = [recurrence(config, world_size, torch.float64) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def train_engine(engine: Engine, config: RunConfig, rank: int, world_size: int, dtype: torch.dtype) -> None:
    scale = float(engine.averaged_over)
    for step in range(STEPS):
        engine.begin_step(rate(config, step))
        of_rank = list(batches(config, step, range(rank, rank + 1), world_size))
        micro_batches = [replace(batch, pixel_values=batch.pixel_values.to(dtype)) for batch, _ in of_rank]
        engine.accumulate(micro_batches, partial(loss_of, step=step, scale=scale), [seed for _, seed in of_rank])
        assert engine.update().skipped == (step == BAD_STEP)
    engine.use_delayed_gradients()


def largest_error(engine: Engine, expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight on this rank."""
    errors = []
    for fragment in engine.fragments():
        if fragment.kind == WEIGHT and fragment.name in expected:
            part = expected[fragment.name].reshape(-1)[fragment.offset : fragment.end]
            errors.append(float((part.double() - fragment.data.double()).abs().max()))
        assert fragment.kind != LATE_GRADIENT
    assert errors
    return max(errors)


def _sum_in_float64(gradients: list[Tensor], device: torch.device) -> Tensor:
    return sum((gradient.square().sum() for gradient in gradients), torch.zeros((), dtype=torch.float64))


def error_of(document: dict[str, Any], dtype: torch.dtype, world_size: int) -> float:
    """The largest difference to the recurrence in float64 on any rank."""
    config, runtime = parse_config(document), start()
    engine = build_engine(config, runtime)
    if dtype == torch.float64:
        engine.module.double()
        norms._sum_of_squares = _sum_in_float64
    expected = expected_weights(json.dumps(document), world_size)
    train_engine(engine, config, runtime.rank, world_size, dtype)
    return largest_error(engine, expected)


def follow_the_recurrence(
    documents: list[dict[str, Any]], dtype: torch.dtype, world_size: int, tolerance: float
) -> None:
    errors = [error_of(document, dtype, world_size) for document in documents]
    assert max(errors) < tolerance, errors


def versions_mixed_up(document: dict[str, Any]) -> None:
    """A step uses its own gradient; then the store publishes new weights before the step that must not see them."""
    exchanging, end_step = DelayedGradients.exchanging, DelayedGradients.end_step
    DelayedGradients.exchanging = nullcontext  # type: ignore[assignment,method-assign]
    DelayedGradients.end_step = lambda *_: None  # type: ignore[method-assign]
    assert error_of(document, torch.float32, 1) > 1e-4
    DelayedGradients.exchanging, DelayedGradients.end_step = exchanging, end_step  # type: ignore[method-assign]
    begin = Updates.begin_step

    def early(self: Updates) -> None:
        begin(self)
        self.publish()

    Updates.begin_step = early  # type: ignore[method-assign]
    assert error_of(document, torch.float32, 1) > 1e-4
    Updates.begin_step = begin  # type: ignore[method-assign]
    assert error_of(document, torch.float32, 1) < TOLERANCE_FP32


def test_in_float64_on_one_rank(folder: Path):
    """To rounding errors: clipping, dropout, tied embeddings, experts, and a step that is skipped included."""
    documents = [layout(folder, 1, 0, 1, **DELAY | changes) for changes in OPTIMIZERS.values()]
    run_distributed(follow_the_recurrence, 1, documents, torch.float64, 1, 1e-12)


def test_on_two_ranks(folder: Path):
    documents = [layout(folder, 2, stage, ep, **DELAY | LARS) for stage, ep in ((0, 1), (1, 2), (2, 1))]
    run_distributed(follow_the_recurrence, 2, documents, torch.float32, 2, TOLERANCE_FP32)


def test_offloaded_experts_on_two_ranks(folder: Path):
    """With several micro-batches new weights have a place of their own, with one that of the gradient."""
    documents = [
        layout(folder, 2, stage, ep, **DELAY | LARS | OFFLOADED | {"train_batch_size": 8 * accumulation})
        for stage, ep, accumulation in ((0, 1, 1), (1, 2, 1), (2, 2, 2))
    ]
    run_distributed(follow_the_recurrence, 2, documents, torch.float32, 2, TOLERANCE_FP32)


def test_versions_that_are_mixed_up_fail(folder: Path):
    """The same on one rank, where nothing is mixed up."""
    document = layout(folder, 1, 1, 1, **DELAY | LARS | OFFLOADED | {"train_batch_size": 4})
    run_distributed(versions_mixed_up, 1, document)


def trained(folder: Path, name: str, attempts: list[tuple[int, int, int, int | None]], **changes: Any) -> Path:
    """A run over attempts of (ranks, ZeRO stage, ep_size, steps in all after which it stops)."""
    for ranks, stage, ep_size, stop_at in attempts:
        document = layout(folder, ranks, stage, ep_size, **DELAY | changes)
        run_distributed(train_in_any_precision, ranks, document, str(folder / name), stop_at)
    return folder / name


def differences(run: Path, other: Path) -> list[str]:
    return compare(*open_step((run, other), None)).differences


RUNS: dict[str, dict[str, Any]] = {
    "LAMB under autocast": {
        "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    },
    "experts in bf16": {
        "bf16": {"enabled": True},
        "m6__offload": {**OFFLOAD, "optimizer": {"type": "Adafactor", "lr": 0.01}, "master_weights": False},
        "train_micro_batch_size_per_gpu": 4,
    },
    "experts in fp16": {
        # The first steps overflow, so that some updates are left out.
        "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1},
        "m6__training__max_skipped_steps": 9,
        "m6__training__total_steps": 8,
        "m6__offload": {**OFFLOAD, "optimizer": {"type": "Adafactor", "lr": 0.01}},
    },
}


@pytest.mark.parametrize("name", cases(RUNS, {"experts in bf16"}))
def test_a_run_resumes_to_the_bit(folder: Path, name: str):
    """Gradients that wait are in the checkpoint of a stopped run, and not in that of a finished one."""
    steps = RUNS[name].get("m6__training__total_steps", 4)
    straight = trained(folder, f"{name} straight", [(2, 1, 1, None)], **RUNS[name])
    stops = [(2, 1, 1, stop) for stop in (steps - 1, None)]
    resumed = trained(folder, f"{name} resumed", stops[:1], **RUNS[name])
    waiting = CheckpointReader(resumed / "checkpoints" / f"step_{steps - 1:08d}")
    assert set(waiting.names(LATE_GRADIENT)) == set(waiting.names(WEIGHT))
    written = 4 * sum(math.prod(shape) for shape in waiting.shapes.values())
    assert written == pytest.approx(predicted_checkpoint(layout(folder, 2, 1, 1, **DELAY | RUNS[name]), 2), rel=0.05)
    trained(folder, f"{name} resumed", stops[1:], **RUNS[name])
    assert differences(resumed, straight) == []
    assert losses(resumed) == losses(straight)
    finished = CheckpointReader(resumed / "checkpoints" / f"step_{steps:08d}")
    assert finished.names(LATE_GRADIENT) == []
    assert LATE_UPDATE not in finished.state


def test_a_run_continues_on_other_layouts(folder: Path):
    """The gradients that wait are those of other ranks, partitions and stores: named ranges, as all of the state."""
    straight = trained(folder, "straight", [(1, 0, 1, None)], **LARS | OFFLOADED)
    attempts = [(2, 1, 2, 1), (2, 2, 1, 3), (1, 0, 1, None)]
    assert losses(trained(folder, "wandering", attempts, **LARS | OFFLOADED)) == pytest.approx(
        losses(straight), rel=TOLERANCE
    )


def test_gradients_that_wait_are_not_lost(folder: Path):
    trained(folder, "given up", [(1, 1, 1, 2)])
    with pytest.raises(
        RuntimeError, match=r"gradients that wait .* go on with m6.gradient_delay and without m6.offload"
    ):
        trained(folder, "given up", [(1, 1, 1, None)], m6__gradient_delay=None)
    with pytest.raises(
        RuntimeError, match=r"gradients that wait .* go on with m6.gradient_delay and without m6.offload"
    ):
        trained(folder, "given up", [(1, 1, 1, None)], m6__offload=OFFLOAD)
    trained(folder, "given up", [(1, 1, 1, None)])


@pytest.mark.parametrize("state", ["copy", "reset"])
def test_the_switch_of_the_pseudo_stage(folder: Path, state: str):
    """The gradients that wait are used before the switch, also in a run that was stopped there."""
    changes = {"m6__pseudo_to_real": {"switch_step": 2, "optimizer_state": state}, "m6__offload": OFFLOAD}
    straight = trained(folder, f"switched {state}", [(1, 1, 1, None)], **changes)
    resumed = trained(folder, f"stopped at the switch {state}", [(1, 1, 1, 2), (1, 1, 1, None)], **changes)
    assert CheckpointReader(resumed / "checkpoints" / "step_00000002").names(LATE_GRADIENT) == []
    assert differences(resumed, straight) == []
