"""Runs one training step of one rank of a large job on fake tensors, and compares it with the planner's formulas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from m6.config.checks import check_world_size
from m6.config.communication import CommunicationSettings
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.errors import UserError
from m6.formatting import markdown_table
from m6.model.outputs import M6Output
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.work import RoutedRows, work_of
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.profile import Profile
from m6.runs.processes import Runtime
from m6.runs.signals import Requests
from m6.training import deepspeed_private
from m6.training.engine.build import build_engine
from m6.training.engine.runner import PlainRunner
from m6.training.engine.updater import Update
from m6.training.fake_world import FakeWorld, fake_batch, fake_process_group, fake_tensors
from m6.training.mesh import ParallelDims
from m6.training.sizes import full_row, scale_batch, storage_bytes
from m6.training.stages.stage import Stage
from m6.training.train_step import TrainStep
from moe import MoELayer
from moe.exchange_traffic import exchange_traffic


@dataclass(frozen=True)
class DryRun:
    """The memory and the communication of one step of one rank, measured and predicted.

    Attributes:
        held: measured bytes: weights, gradients, optimizer_state, activations, and the peak of the step.
        predicted: the same entries by :mod:`m6.planning.cost.memory`.
        ledger: bytes at the peak of the forward and backward pass, by allocating module.
        collectives: (operator, ranks) -> [calls, bytes contributed by this rank].
        exchange: measured and predicted bytes of dispatch and combine from this rank in one step, within and between
            nodes. Without ``m6.moe.ranks_per_node`` all are within one node.
        seconds: duration of the dry run.
    """

    held: dict[str, int]
    predicted: dict[str, int]
    ledger: dict[str, int]
    collectives: dict[tuple[str, tuple[int, ...]], list[int]]
    exchange: dict[str, tuple[int, int]]
    seconds: float


def dry_run(config: RunConfig, world_size: int, rank: int) -> DryRun:
    """Builds the model and the engine of ``rank`` on fake tensors and trains one plain step without padding.

    Raises:
        UserError: the run does not fit ``world_size``, it has a pipeline or tensor groups, it offloads experts (for
            these see ``m6.planning.dry_plan``), or ``rank`` is out of range.
    """
    if config.pipeline is not None:
        raise UserError("m6.parallel.pipeline: fake ranks send no hidden states; plan the run with m6 plan")
    if config.tensor is not None:
        raise UserError("m6.parallel.tensor: fake ranks sum up no parts of products; plan the run with m6 plan")
    check_world_size(config, world_size)
    if config.expert_store is not None:
        raise UserError(
            "m6.offload: the store moves experts of fake tensors nowhere; its dry run is the plan of a step"
        )
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank}: expected one of 0 to {world_size - 1}")
    # Fake ranks gather nothing. The step is therefore a plain step, without the partial sums of "deterministic" and
    # without the residuals of m6.communication. It has the largest batch.
    training = config.m6.training.model_copy(update={"deterministic": None, "batch_ramp": []})
    plain = {"training": training, "communication": CommunicationSettings()}
    config = replace(config, m6=config.m6.model_copy(update=plain))
    begin = time.perf_counter()
    # A row without padding needs the most memory of all batches of the run.
    shape = scale_batch(full_row(config), config.deepspeed.micro_batch_size)
    with fake_process_group(rank, world_size), fake_tensors() as world:
        runtime = Runtime(rank, world_size, 0, torch.device("cpu"))
        stage = Stage(config, None)
        stage.enter_real()  # the Real stage needs more memory than the Pseudo stage
        engine = build_engine(config, runtime, stage.sharing, _MeasuredRunner)
        measured = engine.runner
        assert isinstance(measured, _MeasuredRunner)
        weights = engine.state_bytes()["weights"]  # before a step: stage 3 then keeps small weights gathered
        dims = ParallelDims.of(config, rank, world_size)
        accumulation = config.batch_split(world_size).shares(config.deepspeed.train_batch_size)[dims.dp_rank]
        batches = [fake_batch(config, shape, world)] * accumulation
        train_step = TrainStep(engine, config, runtime, stage)
        train_step(0, batches, Requests)  # the first update allocates the optimizer's state
        world.watch(engine.module)
        world.collectives.clear()  # only the second step is reported: the first one also allocates and initializes
        measured.watch(world)
        before = _sent(engine.module)
        train_step(1, batches, Requests)
        held = {
            "weights": weights,
            "gradients": measured.gradients,
            "optimizer_state": engine.state_bytes()["optimizer_state"],
            "activations": measured.activations,
            "peak": max(measured.peak, world.peak),  # world.peak is the peak of the update
        }
        sent = [now - then for now, then in zip(_sent(engine.module), before, strict=True)]
    layout = layout_of(config, world_size)
    memory = MemoryModel(config, Profile(), full_row(config))
    footprint = memory(layout)
    predicted = {name: getattr(footprint, name) for name in ("weights", "gradients", "optimizer_state", "peak")}
    activations = memory.activations_of(layout)
    # Recomputed activations exist only in the backward pass, and ``held`` is measured at the end of the forward pass.
    predicted["activations"] = layout.overlap_micro_batches * (activations.total() - activations.recomputation())
    to_send = [0.0, 0.0]
    for work, count in work_of(config, memory.model, shape, layout):
        if work.routed is not None:
            for tier, num_bytes in enumerate(_to_send(config, layout, work.routed)):
                to_send[tier] += count * accumulation * num_bytes
    names = ("sent within nodes", "sent between nodes")
    exchange = {name: (found, round(due)) for name, found, due in zip(names, sent, to_send, strict=True)}
    return DryRun(held, predicted, measured.ledger, world.collectives, exchange, time.perf_counter() - begin)


def _sent(model: nn.Module) -> list[int]:
    """Returns the bytes sent to other ranks by all layers so far, within and between nodes."""
    traffic = [module.dispatcher.traffic for module in model.modules() if isinstance(module, MoELayer)]
    return [sum(each.bytes_within_nodes for each in traffic), sum(each.bytes_between_nodes for each in traffic)]


def _to_send(config: RunConfig, layout: ParallelLayout, routed: RoutedRows) -> list[float]:
    """Returns the predicted bytes of one layer and micro-batch by the closed form, within and between nodes."""
    moe = config.model.moe_config()
    passes = [False, True] + [False] * layout.checkpointing  # forward, backward, and recomputation
    arguments = (moe, layout.ep_size, routed.tokens, routed.pairs, moe.ranks_per_node or layout.ep_size)
    tiers = [
        step.num_bytes(routed.to_experts, routed.from_experts)
        for backward in passes
        for step in exchange_traffic(*arguments, backward)
    ]
    return [sum(near for near, _ in tiers), sum(far for _, far in tiers)]


class _MeasuredRunner(PlainRunner):
    """A runner with measurements of the memory of fake tensors during a step.

    Attributes:
        activations: bytes kept by one forward pass for the backward pass.
        gradients: bytes of gradients after the last backward pass.
        peak: largest memory of the forward and backward passes, in bytes.
        ledger: bytes at the peak, by allocating module.
    """

    _world: FakeWorld | None = None

    def watch(self, world: FakeWorld) -> None:
        """Starts the measurements."""
        self._world = world
        self.activations = self.gradients = self.peak = 0
        self.ledger: dict[str, int] = {}

    def forward_all(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> list[M6Output]:
        """Measures the activations of the forward passes before one backward pass."""
        world = self._world
        if world is None:
            return super().forward_all(batches, seeds)
        before = world.total
        world.restart_peak()
        outputs = super().forward_all(batches, seeds)
        self.activations = max(self.activations, world.total - before)
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Measures the gradients and the peak after one backward pass."""
        super().backward(loss)
        if self._world is not None:
            self.gradients = storage_bytes(*deepspeed_private.gradients(self._deepspeed))
            if self._world.peak >= self.peak:
                self.peak, self.ledger = self._world.peak, dict(self._world.at_peak)

    def update(self, learning_rate: float) -> Update:
        """Restarts the peak, to measure the update separately."""
        if self._world is not None:
            self._world.restart_peak()
        return super().update(learning_rate)


def report(result: DryRun, world_size: int, rank: int, nodes: Nodes | None = None) -> str:
    """Formats the result as tables: measured and predicted bytes, the ledger, and the collectives.

    Args:
        nodes: the nodes of the job; None: all ranks are in one node.
    """
    per_node = world_size if nodes is None else nodes.devices_per_node
    parts = [
        [name.replace("_", " "), f"{held:,}", f"{result.predicted[name]:,}", _percent(result.predicted[name], held)]
        for name, held in result.held.items()
    ]
    parts += [
        [f"{name}, a step", f"{measured:,}", f"{predicted:,}", _percent(predicted, measured)]
        for name, (measured, predicted) in result.exchange.items()
        if measured or predicted
    ]
    largest = sorted(result.ledger.items(), key=lambda item: -item[1])
    ledger = [[name or "the engine and the loss", f"{held:,}"] for name, held in largest if held > 0]
    collectives = []
    for (name, ranks), (calls, num_bytes) in sorted(result.collectives.items(), key=lambda item: -item[1][1]):
        inside = "yes" if len({member // per_node for member in ranks}) == 1 else "no"
        collectives.append([name, str(len(ranks)), inside, str(calls), f"{num_bytes:,}"])
    columns = ["collective", "ranks", "inside a node", "calls", "bytes of this rank"]
    return "\n".join(
        [
            f"Rank {rank} of {world_size}: one step on fake tensors, in {result.seconds:.0f} s.",
            "",
            markdown_table(["bytes of the rank", "executed", "formula", "difference"], parts),
            "",
            markdown_table(["at the peak of forward and backward, made by", "bytes"], ledger[:12]),
            "",
            markdown_table(columns, collectives, "lrlrr"),
        ]
    )


def _percent(predicted: int, held: int) -> str:
    return "0" if predicted == held else f"{predicted / held - 1:+.2%}" if held else "-"
