"""The share of a step in which ranks of a pipeline wait: recorded passes of running schedules on a virtual clock.

PYTHONPATH=. python scripts/benchmarks/pipeline_bubbles.py

Four processes train one step with each schedule and record the order of their passes. The clock then runs these
orders: the passes of a rank follow each other, and a pass waits for what it receives. On two cores the processes
themselves would wait for processors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from m6.config.run import RunConfig, load_config
from m6.data.collate import MicroBatch
from m6.model.outputs import M6Output
from m6.planning.cost.schedules import StageSeconds, run_clock, waits_of_equal_stages
from m6.training.engine.async_pipeline import AsyncPipelineRunner
from m6.training.engine.pipeline import NumberedStage
from m6.training.pass_orders import Pass
from scripts.benchmarks.record import ROOT, Recorder

RANKS = 4
STEPS_OF = (8, 16)
"""Micro-batches of a step."""
UNFLUSHED = 8
"""Steps between two flushes."""
SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
TOLERANCE = 0.02
# A backward pass takes twice as long as a forward pass; its halves for inputs and for weights take half of it each.
_RANK = StageSeconds(1, 1, 1)


@contextmanager
def recording() -> Iterator[list[Pass]]:
    """Yields a list that gets the passes of this process."""
    passes: list[Pass] = []
    stage: Any = NumberedStage
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
    inherited = stage.backward_weight_one_chunk

    def forward_one_chunk(self: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        passes.append(Pass("forward", self.stage_index, number))
        return forward(self, number, *args, **kwargs)

    def backward_one_chunk(self: Any, number: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        passes.append(Pass("backward" if full_backward else "input", self.stage_index, number))
        backward(self, number, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self: Any, number: int, *args: Any, **kwargs: Any) -> None:
        passes.append(Pass("weight", self.stage_index, number))
        inherited(self, number, *args, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk
    try:
        yield passes
    finally:
        stage.forward_one_chunk, stage.backward_one_chunk = forward, backward
        del stage.backward_weight_one_chunk


@contextmanager
def recording_without_flush() -> Iterator[list[Pass]]:
    """As ``recording``; micro-batches are numbered through all steps."""
    passes: list[Pass] = []
    runner: Any = AsyncPipelineRunner
    forward, backward = runner._pass_forward, runner._pass_backward

    def pass_forward(self: Any, number: int, *args: Any) -> None:
        passes.append(Pass("forward", self._number, sum(each.kind == "forward" for each in passes)))
        forward(self, number, *args)

    def pass_backward(self: Any) -> None:
        passes.append(Pass("backward", self._number, sum(each.kind == "backward" for each in passes)))
        backward(self)

    runner._pass_forward, runner._pass_backward = pass_forward, pass_backward
    try:
        yield passes
    finally:
        runner._pass_forward, runner._pass_backward = forward, backward


def bubble(orders: Sequence[Sequence[Pass]], stages_per_rank: int) -> float:
    """The share of the time of all ranks in which they wait.

    Args:
        orders: the passes of each rank, in their order.
    """
    stage = StageSeconds(*(seconds / stages_per_rank for seconds in (_RANK.forward, _RANK.input, _RANK.weight)))
    busy = sum(stage.of(each.kind) for order in orders for each in order) / len(orders)
    return 1 - busy / run_clock(orders, [stage] * (len(orders) * stages_per_rank))


def formula(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int) -> float:
    """The bubble of equal stages."""
    waits = waits_of_equal_stages(schedule, ranks, stages_per_rank, _RANK)
    return waits / (micro_batches * _RANK.total + waits)


def _config(schedule: str, micro_batches: int, *changes: str) -> RunConfig:
    return load_config(
        ROOT / "configs" / "m6_smoke.json",
        (
            "m6.pseudo_to_real=null",
            "m6.model.num_layers=8",
            f"m6.parallel.pipeline.num_ranks={RANKS}",
            f"m6.parallel.pipeline.schedule={schedule}",
            "zero_optimization.stage=1",
            "train_micro_batch_size_per_gpu=1",
            f"train_batch_size={micro_batches}",
            *changes,
        ),
    )


def causal_batch(config: RunConfig) -> MicroBatch:
    """A micro-batch of one row that is all target."""
    shape = (1, config.m6.data.sequence_length)
    ids, zeros = torch.randint(5, 50, shape), torch.zeros(shape, dtype=torch.int64)
    size = config.model.image_size
    return MicroBatch(
        input_ids=ids, token_type_ids=zeros + 2, position_ids=zeros, sample_ids=zeros + 1, labels=ids,
        objective_ids=zeros, data_source_ids=zeros,
        pixel_values=torch.empty(0, 3, size, size), num_target_tokens=shape[1], num_tokens=shape[1], num_samples=1,
        num_token_pairs=shape[1] ** 2,
    )  # fmt: skip


def part_of_loss(_: MicroBatch, output: M6Output) -> torch.Tensor:
    """The loss of a micro-batch, or of some of its layers or tokens."""
    assert output.aux_loss is not None
    return output.aux_loss if output.target_losses is None else output.aux_loss + output.target_losses.mean()


def _train(rank: int, port: int, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    from m6.runs.processes import start
    from m6.training.engine.build import build_engine

    runtime = start()
    for schedule in SCHEDULES:
        for micro_batches in STEPS_OF:
            config = _config(schedule, micro_batches)
            engine = build_engine(config, runtime)
            engine.begin_step(0.0)
            with recording() as passes:
                engine.accumulate([causal_batch(config)] * micro_batches, part_of_loss, range(micro_batches))
            traces: list[Any] = [None] * RANKS
            dist.all_gather_object(traces, passes)
            if rank == 0:
                results.put((schedule, micro_batches, 1, traces))
    for micro_batches in STEPS_OF:
        config = _config("1f1b", micro_batches, "m6.gradient_delay={}")
        engine = build_engine(config, runtime)
        with recording_without_flush() as passes:
            for _ in range(UNFLUSHED):
                engine.begin_step(0.0)
                engine.accumulate([causal_batch(config)] * micro_batches, part_of_loss, range(micro_batches))
                engine.advance()
            engine.update()
        traces = [None] * RANKS
        dist.all_gather_object(traces, passes)
        if rank == 0:
            results.put(("1f1b", micro_batches, UNFLUSHED, traces))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Records and compares."""
    recorder = Recorder("pipeline_bubbles", "How long ranks of a pipeline wait")
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = torch.multiprocessing.start_processes(
        _train, (29000 + os.getpid() % 1000, results), nprocs=RANKS, join=False, start_method="spawn"
    )
    found: list[Any] = []
    ended = False
    while not ended:
        ended = processes.join(timeout=1.0)  # raises an error if a process has failed
        while not results.empty():
            found.append(results.get())
    rows, numbers, wrong = [], [], []
    for schedule, micro_batches, steps, traces in found:
        stages = _config(schedule, micro_batches).pipeline
        assert stages is not None
        measured = bubble(traces, stages.stages_per_rank())
        expected = formula(schedule, RANKS, micro_batches * steps, stages.stages_per_rank())
        name = schedule if steps == 1 else f"{schedule} without a flush, {steps} steps"
        rows.append([name, str(micro_batches), f"{measured:.2%}", f"{expected:.2%}"])
        numbers.append({"schedule": name, "micro_batches": micro_batches, "bubble": measured, "formula": expected})
        if abs(measured - expected) > TOLERANCE * expected:
            wrong.append(name)
    notes = (
        f"One step of `m6_smoke.json` with 8 layers on {RANKS} gloo ranks for each row. The passes are recorded where "
        "PyTorch's schedules call our stages, and run again on a clock on which a forward pass of all layers of a rank "
        "takes 1, a backward pass 2, its halves for inputs and weights 1 each, and messages nothing. With M "
        "micro-batches and P ranks the formulas are (P - 1) / (M + P - 1) for `1f1b`, (P - 1) / (2 M + P - 1) for "
        "`interleaved_1f1b` with two stages a rank, and (P - 1) / (6 M + P - 1) for the others. K steps of `1f1b` "
        "without a flush (`m6.gradient_delay`) wait (P - 1) / (K M + P - 1). These are the waits of the schedule "
        "alone: on real devices messages, unequal stages and the products of experts, which do not split, come on top."
    )
    recorder.write(["schedule", "micro-batches", "waits, recorded", "formula"], rows, notes, {"runs": numbers})
    if wrong:
        sys.exit(f"more than {TOLERANCE:.0%} off: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
