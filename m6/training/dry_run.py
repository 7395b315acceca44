"""One training step of one rank of a large job, by the real code over fake numbers, beside the planner's formulas."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m6.config.run import RunConfig, check_world_size
from m6.data.collate import IGNORED_LABEL, MicroBatch
from m6.errors import UserError
from m6.planning.cost.batch_shape import BatchShape, full_row, scale_batch
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.storages import storage_bytes
from m6.planning.cost.work import work_of
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.fake_world import FakeWorld, fake_process_group, fake_tensors, to_fake
from m6.planning.machine.profile import Profile
from m6.planning.search.configuration import layout_of


@dataclass(frozen=True)
class DryRun:
    """What a step of one rank held and sent, and what the formulas say.

    Attributes:
        held: bytes by part: weights, gradients, optimizer_state, activations; and the peak of the step.
        predicted: the same by :mod:`m6.planning.cost.memory`.
        ledger: bytes at the peak of the forward and backward pass, by the module that made them.
        collectives: (operator, ranks) -> [calls, bytes contributed by this rank].
        exchange: bytes of a rank's rows to experts and back in one step: found and predicted.
    """

    held: dict[str, int]
    predicted: dict[str, int]
    ledger: dict[str, int]
    collectives: dict[tuple[str, tuple[int, ...]], list[int]]
    exchange: tuple[int, int]
    seconds: float


def dry_run(config: RunConfig, world_size: int, rank: int) -> DryRun:
    """Builds the model and the engine of ``rank`` and trains one step on a batch without padding.

    Raises:
        UserError: the run does not fit ``world_size``, or there is no such rank.
    """
    from m6.runs.processes import Runtime
    from m6.training.engine.build import build_engine
    from m6.training.engine.fragments import base_optimizer
    from m6.training.reporting.sums import Wishes
    from m6.training.stages.stage import Stage
    from m6.training.train_step import TrainStep

    accumulation = check_world_size(config, world_size)
    if config.offload is not None:
        raise UserError("m6.offload: a dry run has no host to offload to; leave it out, or see what m6 pretrain prints")
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank}: expected one of 0 to {world_size - 1}")
    begin = time.perf_counter()
    shape = scale_batch(full_row(config), config.deepspeed.micro_batch_size)
    with fake_process_group(rank, world_size), fake_tensors() as world:
        runtime = Runtime(rank, world_size, 0, torch.device("cpu"))
        stage = Stage(config, None)
        stage.enter_real()  # the larger one
        engine = build_engine(config, runtime, stage.sharing)
        parameters = list(engine.module.parameters())
        weights = storage_bytes(*parameters, *engine.module.buffers())
        if config.deepspeed.zero_stage == 3:
            weights += storage_bytes(*(parameter.ds_tensor for parameter in parameters))
        batches = [fake_batch(config, shape, world)] * accumulation
        TrainStep(engine, config, runtime, accumulation, stage)(0, batches, Wishes)  # makes the optimizer's state
        world.watch(engine.module)
        world.collectives.clear()
        moments = _Moments(world, engine, accumulation)
        TrainStep(moments, config, runtime, accumulation, stage)(1, batches, Wishes)
        states = [value for entry in base_optimizer(engine).state.values() for value in entry.values()]
        masters = getattr(engine.optimizer, "single_partition_of_fp32_groups", [])
        masters = getattr(engine.optimizer, "fp32_partitioned_groups_flat", masters)
        held = {
            "weights": weights,
            "gradients": moments.gradients,
            "optimizer_state": storage_bytes(*states, *masters),
            "activations": moments.activations,
            "peak": max(moments.peak, world.peak),
        }
    layout = layout_of(config, world_size)
    memory = MemoryModel(config, Profile(), full_row(config))
    footprint = memory(layout)
    predicted = {name: getattr(footprint, name) for name in ("weights", "gradients", "optimizer_state", "peak")}
    activations = memory.activations_of(layout)
    # Of what is computed anew nothing lives at the end of the forward pass.
    predicted["activations"] = activations.total() - activations.recomputation()
    again = 3 if layout.checkpointing else 2
    rows = sum(
        count * again * sum(work.exchange_bytes) * accumulation
        for work, count in work_of(config, memory.model, shape, layout.ep_size)
    )
    found = sum(num_bytes for (name, _), (_, num_bytes) in world.collectives.items() if name == "alltoall")
    return DryRun(held, predicted, moments.ledger, world.collectives, (found, rows), time.perf_counter() - begin)


def fake_batch(config: RunConfig, shape: BatchShape, world: FakeWorld) -> MicroBatch:
    """A micro-batch of rows of one sample each, of target tokens behind one picture."""
    model = config.model
    rows, length, patches = shape.rows, shape.sequence_length, model.num_patches if shape.pictures else 0
    input_ids = torch.zeros(rows, length, dtype=torch.int64)
    input_ids[:, :patches] = model.image_token_id
    types = torch.full((rows, length), 2)
    types[:, :patches] = 0
    positions = torch.arange(length).repeat(rows, 1)
    positions[:, patches:] -= patches
    labels = torch.zeros(rows, length, dtype=torch.int64)
    labels[:, 0] = IGNORED_LABEL  # the first token is predicted from nothing
    return MicroBatch(
        input_ids=input_ids,
        token_type_ids=types,
        position_ids=positions,
        sample_ids=torch.ones(rows, length, dtype=torch.int64),
        labels=labels,
        loss_weights=torch.ones(rows, length, dtype=torch.int64),
        objective_ids=torch.zeros(rows, length, dtype=torch.int64),
        pixel_values=to_fake(world, torch.empty(shape.pictures, 3, model.image_size, model.image_size)),
        num_target_tokens=rows * (length - 1),
        num_tokens=rows * length,
        num_samples=rows,
    )


class _Moments:
    """Stands before the engine and looks at memory between the parts of a step."""

    def __init__(self, world: FakeWorld, engine: Any, accumulation: int) -> None:
        self.world, self.engine, self.left = world, engine, accumulation
        self.activations = self.gradients = self.peak = 0
        self.ledger: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self.world.total
        self.world.restart_peak()
        output = self.engine(*args, **kwargs)
        self.activations = max(self.activations, self.world.total - before)
        return output

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self.engine.backward(*args, **kwargs)
        self.left -= 1
        if self.world.peak >= self.peak:
            self.peak, self.ledger = self.world.peak, dict(self.world.at_peak)
        if self.left == 0:
            self.gradients = storage_bytes(*self._gradients())

    def _gradients(self) -> list[Tensor]:
        held = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        for name in ("averaged_gradients", "all_grad_tensors"):
            for group in getattr(self.engine.optimizer, name, {}).values():
                held += [gradient for gradient in group or () if gradient is not None]
        if hasattr(self.engine.optimizer, "grad_partitions_flat_buffer"):
            held.append(self.engine.optimizer.grad_partitions_flat_buffer)
        return held

    def step(self) -> None:
        if self.left == 0:
            self.world.restart_peak()
        self.engine.step()


def report(result: DryRun, world_size: int, rank: int, nodes: Nodes | None = None) -> str:
    """Tables: parts against the formulas, the ledger, the collectives by tier where the nodes are known."""
    per_node = world_size if nodes is None else nodes.devices_per_node
    lines = [
        f"Rank {rank} of {world_size}: one step in {result.seconds:.0f} s without a number being multiplied.",
        "",
        "| bytes of the rank | executed | formula | difference |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, held in result.held.items():
        predicted = result.predicted[name]
        lines.append(f"| {name.replace('_', ' ')} | {held:,} | {predicted:,} | {_percent(predicted, held)} |")
    found, rows = result.exchange
    lines.append(f"| rows to experts and back, a step | {found:,} | {rows:,} | {_percent(rows, found)} |")
    lines += ["", "| at the peak of forward and backward, made by | bytes |", "| --- | ---: |"]
    largest = sorted(result.ledger.items(), key=lambda item: -item[1])
    lines += [f"| {name or 'the engine and the loss'} | {held:,} |" for name, held in largest if held > 0][:12]
    lines += [
        "",
        "| collective | ranks | inside a node | calls | bytes of this rank |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for (name, ranks), (calls, num_bytes) in sorted(result.collectives.items(), key=lambda item: -item[1][1]):
        inside = "yes" if len({member // per_node for member in ranks}) == 1 else "no"
        lines.append(f"| {name} | {len(ranks)} | {inside} | {calls} | {num_bytes:,} |")
    return "\n".join(lines)


def _percent(predicted: int, held: int) -> str:
    return "0" if predicted == held else f"{predicted / held - 1:+.2%}" if held else "-"
