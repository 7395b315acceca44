"""The training loop: read it first, it says what happens in which order."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from m6.config import RunConfig, check_tokenizer, check_world_size
from m6.data.pretraining import MicroBatch, PretrainingData
from m6.errors import UserError
from m6.planning.activations import BatchShape
from m6.planning.memory import describe, predict_memory
from m6.training.checkpoint import Checkpointer, resume
from m6.training.engine import build_engine
from m6.training.evaluation import evaluate
from m6.training.nonfinite import NonfinitePolicy
from m6.training.offloading import offloaded_experts
from m6.training.report import IntervalReport
from m6.training.run_directory import RunDirectory
from m6.training.runtime import Runtime
from m6.training.signals import StopFlag
from m6.training.trackers import Trackers
from m6.training.train_step import TrainStep


class Trainer:
    """One attempt at a run: from its newest checkpoint, or from scratch, to its end or to a stop.

    The only progress that is stored is numbers: since data, masking and dropout are functions of the step,
    step N is the same step whatever happened before it.
    """

    def __init__(self, config: RunConfig, run: RunDirectory, runtime: Runtime) -> None:
        self.config, self.run, self.runtime, self.settings = config, run, runtime, config.m6
        self.accumulation = check_world_size(config, runtime.world_size)
        self.data = open_data(config)
        self.engine = build_engine(config, runtime)
        self.train_step = TrainStep(self.engine, config, runtime, self.accumulation)
        self.nonfinite = NonfinitePolicy(run, self.settings.training.max_skipped_steps, config.deepspeed.precision)
        checkpoint = self.settings.checkpoint
        self.checkpointer = Checkpointer(run.checkpoints, runtime, checkpoint.keep_last, checkpoint.async_save)
        self.trackers = Trackers(run, self.settings.logging, config.document) if runtime.is_main else None
        self.stop_flag = StopFlag()
        self.step = self.samples_seen = self.tokens_seen = 0

    def train(self) -> bool:
        """Runs to the end or to a stop; returns whether the run is done."""
        self._resume()
        self._say_memory()
        total = self.settings.training.total_steps
        report = IntervalReport(self.config, self.runtime)
        batches = self._batches()
        stopped = False
        # tqdm is silent by itself where there is no terminal.
        hidden = None if self.runtime.is_main else True
        with tqdm(total=total, initial=self.step, unit="step", desc="pretrain", disable=hidden) as progress:
            while self.step < total and not stopped:
                begin = time.perf_counter()
                micro_batches = next(batches)
                data_wait_s = time.perf_counter() - begin
                outcome = self.train_step(self.step, micro_batches, self._stop_wanted())
                self._plan_offload()
                self.step += 1
                self.samples_seen += outcome.samples
                self.tokens_seen += outcome.tokens
                self._list_bad_rows(micro_batches)
                report.add(outcome, data_wait_s)
                self.nonfinite.check(self.step, outcome, micro_batches, self.runtime)
                stopped = outcome.result.stop
                self._write_progress()
                progress.update()
                progress.set_postfix(loss=f"{outcome.loss:.3f}", refresh=False)
                self._at_intervals(report, ending=stopped or self.step == total)
        self.checkpointer.wait()
        dist.barrier()
        return self._finish()

    def _at_intervals(self, report: IntervalReport, ending: bool) -> None:
        """Logs, validates, saves: in this order, so that a checkpoint never lies ahead of its metrics."""
        settings = self.settings
        if self.step % settings.logging.interval_steps == 0 or ending:
            entry = report.finish(self.step, self.samples_seen, self.tokens_seen)
            self._track({**entry, **self.train_step.health.reduce()})
        if self.step % settings.evaluation.interval_steps == 0 or self.step == settings.training.total_steps:
            begin = time.perf_counter()
            losses = evaluate(self.engine, self.data, settings.evaluation.num_batches, self.runtime)
            self._track({"step": self.step, "time": time.time(), "validation": losses})
            report.exclude(time.perf_counter() - begin)
        if self.step % settings.checkpoint.interval_steps == 0 or ending:
            report.add_checkpoint_stall(self._save())

    def _batches(self) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each step from the current one on.

        Micro-batches have global numbers; rank r takes every world-size-th, so that a step holds the same
        ones on any number of ranks.
        """
        world, rank = self.runtime.world_size, self.runtime.rank
        per_step = self.accumulation * world
        first, last = self.step * per_step, self.settings.training.total_steps * per_step
        loader = iter(self.data.loader(range(first + rank, last, world), self.settings.data.num_workers))
        while True:
            yield [next(loader) for _ in range(self.accumulation)]

    def _resume(self) -> None:
        state, problems = resume(self.engine, self.run.checkpoints)
        for problem in problems:
            self._say(f"warning: checkpoint not used: {problem}")
        if state is not None:
            if state["tokenizer"] != self.data.tokenizer.fingerprint:
                raise UserError(
                    f"{self.settings.data.tokenizer}: the tokenizer is not the one of the checkpoint in {self.run.root}"
                )
            self.step, self.samples_seen, self.tokens_seen = state["step"], state["samples_seen"], state["tokens_seen"]
            self._say(f"resumed {self.run.root} at step {self.step}")
        if self.runtime.is_main:
            self.run.cut_metrics_after(self.step)

    def _say_memory(self) -> None:
        """Prints the memory that a few of the run's micro-batches will need."""
        if self.runtime.is_main:
            shape = BatchShape.of(*(self.data.micro_batch(index) for index in range(4)))
            self._say(describe(predict_memory(self.config, self.runtime.world_size, shape)))

    def _plan_offload(self) -> None:
        """After the first step of an attempt, which shows in which order experts are used."""
        experts = offloaded_experts(self.engine)
        if experts is not None and not experts.is_planned:
            self._say(experts.plan())

    def _save(self) -> float:
        if self.runtime.is_main:
            self.run.sync_metrics()
        state = {
            "samples_seen": self.samples_seen,
            "tokens_seen": self.tokens_seen,
            "tokenizer": self.data.tokenizer.fingerprint,
            "model": self.config.model.to_diff_dict(),
        }
        return self.checkpointer.save(self.engine, self.step, state)

    def _list_bad_rows(self, micro_batches: list[MicroBatch]) -> None:
        """Every rank lists the rows that it could not use in a file of its own."""
        rows = [row for batch in micro_batches for row in batch.bad_rows]
        if rows:
            with (self.run.root / f"bad_rows_rank_{self.runtime.rank:05d}.txt").open("a", encoding="utf-8") as file:
                file.writelines(f"step {self.step}: {row}\n" for row in rows)

    def _finish(self) -> bool:
        done = self.step == self.settings.training.total_steps
        if self.runtime.is_main and done:
            self.run.finish(self.step)
        self._say(f"{'finished' if done else 'stopped'} {self.run.root} at step {self.step}")
        return done

    def _stop_wanted(self) -> bool:
        return self.stop_flag.raised or (self.runtime.is_main and self.run.stop_requested())

    def _write_progress(self) -> None:
        if self.runtime.is_main:
            self.run.write_progress(self.step, self.settings.training.total_steps)

    def _track(self, entry: dict[str, Any]) -> None:
        if self.trackers is not None:
            self.trackers.write(entry)

    def _say(self, text: str) -> None:
        if self.runtime.is_main:
            print(text, file=sys.stderr, flush=True)


def open_data(config: RunConfig) -> PretrainingData:
    """The run's data: micro-batches to train on, and fixed ones to validate on."""
    settings = config.m6
    data = PretrainingData(
        settings.data,
        settings.objectives,
        seed=settings.training.seed,
        micro_batch_size=config.deepspeed.micro_batch_size,
        image_size=config.model.image_size,
        patch_size=config.model.patch_size,
    )
    check_tokenizer(config, data.tokenizer)
    return data


def pretrain(config: RunConfig, root: Path, runtime: Runtime) -> bool:
    """Trains ``config`` in the folder ``root``, resuming whatever is there; returns whether the run is done."""
    run = RunDirectory(root)
    if runtime.is_main:
        run.open(config, runtime.world_size)
    dist.barrier()
    trainer = Trainer(config, run, runtime)
    try:
        return trainer.train()
    finally:
        if trainer.trackers is not None:
            trainer.trackers.close()
