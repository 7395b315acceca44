"""The training loop. Read this file first: it shows the order of all events in a run."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from m6.architecture.configuration import M6Config
from m6.architecture.sharing import Sharing
from m6.checkpoints.discovery import lost_newest, open_newest, open_together
from m6.checkpoints.format import no_progress
from m6.checkpoints.tokenizers import keep_tokenizers
from m6.config.checks import check_world_size
from m6.config.run import RunConfig
from m6.data.pretraining import MicroBatch
from m6.errors import StorageError, UserError
from m6.runs.attestation import attest, check_shared
from m6.runs.data import check_sources_unchanged, keep_captions, keep_sources, open_data
from m6.runs.directory import SAMPLES, RunDirectory
from m6.runs.life import LifeSigns
from m6.runs.processes import Runtime, free_memory, on_main_rank, return_freed_memory
from m6.runs.signals import Requests, StopFlag
from m6.runs.trackers import Trackers
from m6.training.checkpointing import Checkpointer, check_same_sums, check_same_tokenizers, restore, restore_weights
from m6.training.engine.build import build_engine
from m6.training.evaluation import evaluate
from m6.training.faults import Fault, PassingFault, end, naming_the_budget
from m6.training.mesh import ParallelDims
from m6.training.meta_model import count_trained
from m6.training.replicas import find_difference
from m6.training.reporting.console import Console
from m6.training.reporting.experts import UnroutedTokens, reports_loads
from m6.training.reporting.interval import IntervalReport
from m6.training.reporting.nonfinite import NonfinitePolicy, find_nonfinite_state
from m6.training.reporting.ranks import RankTimes
from m6.training.reporting.sums import StepOutcome
from m6.training.sizes import BatchShape
from m6.training.stages.metrics import StageMetrics
from m6.training.stages.stage import Stage
from m6.training.train_step import (
    NEXT_RATE,
    AsyncTrainStep,
    TrainStep,
    changed_rate,
    micro_batch_numbers,
    scheduled_rate,
)

if TYPE_CHECKING:
    from m6.training.reporting.samples import SampleGrids


class Forecast(Protocol):
    """The expected memory and time of a run, as text for its log. The command line passes that of the planner."""

    def memory(self, batch: BatchShape, sharing: Sharing | None) -> str:
        """Describes the memory of the fullest rank.

        Args:
            batch: the shape of a micro-batch.
            sharing: what the layers share in the Pseudo phase; None: nothing.
        """

    def step(self, batch: BatchShape) -> str:
        """Describes a step, and may write the prediction to the run's folder."""

    def outcome(self) -> str:
        """Compares the finished run with its prediction; empty if that is impossible."""


class Trainer:
    """One attempt at a run: from its newest checkpoint, or from scratch, to its end or to a stop.

    Data, masking and dropout are functions of the step, so step N is the same in every attempt. A checkpoint needs only
    counters to continue the data.

    Args:
        run: the run's folder, already opened.
        stop_flag: set by stop signals; created here if it is None.
        forecast: announces memory and time at the start, and compares them at the end; None: nothing is predicted.
        may_restart: whether the caller trains again from the last checkpoint after a ``PassingFault``; otherwise a
            fault is FATAL.

    Attributes:
        step: number of finished optimizer steps.
        samples_seen, tokens_seen: numbers of samples and tokens trained on so far, over all ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        runtime: Runtime,
        stop_flag: StopFlag | None = None,
        forecast: Forecast | None = None,
        may_restart: bool = False,
    ) -> None:
        self.config, self.run, self.runtime, self.settings = config, run, runtime, config.m6
        self._forecast, self._may_restart = forecast, may_restart
        check_world_size(config, runtime.world_size)
        self.dims = ParallelDims.of(config, runtime.rank, runtime.world_size)
        self.data = open_data(config)
        on_main_rank(self.data.check_files)
        # Before the engine is built: the checkpoint decides between the Pseudo and the Real model.
        self._show_loading = run.show_loading if runtime.is_main else no_progress
        self.checkpoint, self.problems = open_newest(run.checkpoints, self._show_loading)
        if self.checkpoint is None:
            on_main_rank(lambda: run.check_never_saved(self.problems))
        else:
            on_main_rank(lambda: check_sources_unchanged(run.root, self.data))
        self.stage = Stage(config, self.checkpoint.state if self.checkpoint is not None else None)
        self.stage_metrics = StageMetrics(self.stage)
        if (note := config.note_of_stage) is not None:
            self._print(f"note: {note}")
        self._build_engine()
        self.nonfinite = NonfinitePolicy(
            run, self.settings.training.max_skipped_steps, config.deepspeed.smallest_loss_scale
        )
        self.unrouted = UnroutedTokens(config)
        checkpoint = self.settings.checkpoint
        self.checkpointer = Checkpointer(run.checkpoints, runtime, checkpoint.keep_last, checkpoint.async_save)
        self.sample_grids = self._open_sample_grids()
        self.stop_flag = stop_flag or StopFlag()
        self.step = self.samples_seen = self.tokens_seen = 0
        # Last: if the constructor fails, no caller can close the trackers.
        resumed = 0 if self.checkpoint is None else self.checkpoint.state["step"]
        self.trackers = Trackers(run, self.settings.logging, config.document, resumed) if runtime.is_main else None

    @naming_the_budget()
    def train(self, stop_after: int | None = None) -> bool:
        """Trains to the end of the run or to a stop; returns whether the run is finished.

        Args:
            stop_after: number of the last step; all ranks then stop, as on a stop request.
        """
        self._resume()
        self._check_replicas()
        if self.runtime.is_main:
            for text in self._announcements():
                self._print(text)
        total = self.settings.training.total_steps
        report, times = IntervalReport(self.config, self.runtime), RankTimes(self.runtime)
        batches = self._batches()
        in_flight: deque[list[MicroBatch]] = deque()
        stopped = False
        with Console(self.run.root.name, total, self.step, self.runtime.is_main) as self.console, times:
            while self.step < total and not stopped:
                begin = time.perf_counter()
                times.begin_step()
                in_flight.append(next(batches))
                times.has_data()
                report.add_data_wait(time.perf_counter() - begin)
                self.nonfinite.prepare(self.engine.module)
                with self.engine.measuring(), self.stage_metrics.watch(self.engine, self.step):
                    outcomes = self.run_step(in_flight[-1])
                times.end_step()
                self._replan_offloading()
                self.step += 1
                bad_rows = [row for batch in in_flight[-1] for row in batch.bad_rows if self.dims.is_data_leader]
                self.run.list_bad_rows(self.runtime.rank, self.step, bad_rows)
                if self.step == stop_after:
                    outcomes += self.train_step.flush()
                for outcome in outcomes:
                    self._observe(outcome, in_flight.popleft(), report)
                if self.step == total or self.stage.is_due:
                    self.engine.use_delayed_gradients()
                # All ranks have the same requests here, so that they stop and save after the same step.
                requests = Requests.of_all(outcome.result.requests for outcome in outcomes)
                stopped = requests.stop or self.step == stop_after or self.stage.ends_job
                self._write_progress()
                self.console.advance()
                ending = stopped or self.step == total
                self._at_intervals(report, times, save=requests.save or ending or self.stage.is_due)
                if requests.save:
                    self._answer_save_request()
                if self.stage.is_due and not stopped:
                    self._delink()
        self.checkpointer.wait()  # no rank may leave before the main rank's thread has written the manifest
        return self._finish()

    def _observe(self, outcome: StepOutcome, micro_batches: list[MicroBatch], report: IntervalReport) -> None:
        self.samples_seen += outcome.samples
        self.tokens_seen += outcome.tokens
        report.add(outcome)
        fault = self.nonfinite.check(outcome, micro_batches, self.runtime, self.engine)
        if fault is not None:
            self._end_with(fault)
        self.stage.observe(outcome.step, outcome.loss, self.stage_metrics.measure(self.engine))

    def run_step(self, micro_batches: list[MicroBatch]) -> list[StepOutcome]:
        """Trains on this rank's micro-batches of the current step; returns the outcomes of finished steps."""
        return self.train_step(self.step, micro_batches, self._read_requests)

    def _end_with(self, fault: Fault) -> NoReturn:
        """Completes the last checkpoint and ends the training. The caller may restart from this checkpoint."""
        self.checkpointer.wait()
        end(fault, self.run, self._may_restart)

    def _check_replicas(self) -> None:
        """Compares copies of weights on several ranks, if the run asks for it. A difference ends the training."""
        if self.settings.training.check_replicas_interval_steps is None or self.runtime.world_size == 1:
            return
        difference = find_difference(self.engine.replicated(), self.runtime)
        if difference is not None:
            self._end_with(Fault(self.step, self.step, f"step {self.step}: ranks hold unequal copies: {difference}"))

    def _at_intervals(self, report: IntervalReport, times: RankTimes, save: bool) -> None:
        """Logs, validates and saves, in this order: a checkpoint is never newer than its metrics."""
        settings = self.settings
        compared = settings.training.check_replicas_interval_steps
        saves = save or (self.step % settings.checkpoint.interval_steps == 0 and not self.nonfinite.consecutive)
        if saves or (compared is not None and self.step % compared == 0):
            self._check_replicas()
        # Only compared weights and finite values are saved, so a run can restart from any checkpoint.
        if saves and (found := find_nonfinite_state(self.engine, self.runtime)):
            self._end_with(Fault(self.step, self.step, f"after step {self.step}: {found}"))
        if self.step % settings.logging.interval_steps == 0 or save:
            loads = reports_loads(self.step, settings.training.total_steps, settings.logging.interval_steps)
            health = self.train_step.health.reduce(loads)
            entry = report.finish(self.step, self.samples_seen, self.tokens_seen, health.get("experts_per_token"))
            noise = self.train_step.noise.finish()
            of_engine = self.engine.interval_metrics()
            of_ranks = times.slowest()
            self._track({**entry, **of_ranks, **health, **noise, **of_engine, **self.stage_metrics.finish(self.engine)})
            if warning := self.unrouted.warning(self.step, health):
                self._print(warning)
        if self._is_due(settings.evaluation.interval_steps):
            begin = time.perf_counter()
            losses = evaluate(self.engine, self.data, settings.evaluation.num_rows, self.dims, self.runtime)
            return_freed_memory(self.runtime.device)
            self._track({"step": self.step, "time": time.time(), **losses})
            report.exclude(time.perf_counter() - begin)
        if self.sample_grids is not None and self._is_due(self.sample_grids.settings.interval_steps):
            begin = time.perf_counter()
            self.console.draws(self.step)
            picture = self.sample_grids.draw(self.engine, self.step)
            if self.trackers is not None and picture is not None:
                self.trackers.show("samples", picture, self.step)
            report.exclude(time.perf_counter() - begin)
        if saves:
            stall_s = self._save()
            report.add_checkpoint_stall(stall_s)
            self.console.saved(self.step, stall_s)
        self.checkpointer.check()  # a full disk ends the run now, not at the next checkpoint

    def _is_due(self, interval_steps: int) -> bool:
        return self.step % interval_steps == 0 or self.step == self.settings.training.total_steps

    def _batches(self) -> Iterator[list[MicroBatch]]:
        """Yields this rank's micro-batches of each step, from the current step on."""
        steps, split = (
            range(self.step, self.settings.training.total_steps),
            self.config.batch_split(self.dims.world_size),
        )
        of_steps = (micro_batch_numbers(self.config, self.dims, split, step) for step in steps)
        # The loader reads ahead of the steps.
        ahead, counted = itertools.tee(of_steps)
        numbers = itertools.chain.from_iterable(ahead)
        # One loader for the whole attempt: its workers prepare the next steps during the current one.
        loader = iter(self.data.loader(numbers, self.settings.data.num_workers))
        for own in counted:
            yield [next(loader) for _ in own]

    def _build_engine(self) -> None:
        self.engine = build_engine(self.config, self.runtime, self.stage.sharing)
        kind = AsyncTrainStep if self.config.is_asynchronous else TrainStep
        self.train_step = kind(self.engine, self.config, self.runtime, self.stage)

    def _open_sample_grids(self) -> SampleGrids | None:
        if self.settings.samples is None:
            return None
        from m6.training.reporting.samples import open_sample_grids

        return open_sample_grids(self.config, self.data.tokenizer, self.run.root / SAMPLES, self.runtime)

    def _resume(self) -> None:
        for problem in self.problems:
            self._print(f"warning: checkpoint not used: {problem}")
        if self.checkpoint is not None:
            state = self.checkpoint.state
            check_same_tokenizers(self.settings.data, self.data.tokenizer_identities, state, self.run.root)
            check_same_sums(self.config, state)
            restore(self.engine, self.stage.reader(self.checkpoint), self._show_loading)
            self.checkpoint = None  # closes the files of its shards
            self.step, self.samples_seen, self.tokens_seen = state["step"], state["samples_seen"], state["tokens_seen"]
            self._print(f"resumed {self.run.root} at step {self.step}")
            if warning := changed_rate(self.config, state):
                self._print(warning)
        elif self.settings.init is not None:
            from m6.checkpoints.initial import open_initial_weights

            initial = open_initial_weights(self.settings.init, self._show_loading)
            restore_weights(self.engine, initial, self._show_loading)
            # Unlike the files of a checkpoint, those of an exported model have no checksums.
            if difference := find_difference(self.engine.replicated(), self.runtime):
                raise UserError(f"m6.init {self.settings.init}: ranks read unequal weights: {difference}")
            self._print(f"{self.run.root} starts from the weights of {self.settings.init}")
        on_main_rank(self._keep_records)

    def _keep_records(self) -> None:
        if lost := lost_newest(self.run.checkpoints, self.step, explained=bool(self.problems)):
            self._print(f"warning: {lost}")
        keep_tokenizers(self.run.root, self.data.tokenizer, self.settings.data.image_tokenizer)
        keep_sources(self.run.root, self.data)
        if self.settings.init is not None:
            from m6.checkpoints.provenance import keep_initial

            keep_initial(self.run.root, self.settings.init)
        keep_captions(self.run.root, self.data, self.settings.init)
        # The previous attempt may have logged steps after its last checkpoint. This attempt repeats them.
        self.run.cut_bad_rows_after(self.step)
        damaged = self.run.cut_metrics_after(self.step)
        if lost := self.run.lost_metrics(self.step, self.settings.logging.interval_steps):
            self._print(f"warning: {lost}")
        if damaged:
            self._print(f"warning: {self.run.metrics}: set aside damaged lines {', '.join(map(str, damaged))}")

    def _delink(self) -> None:
        """Replaces the Pseudo model by the Real model. The Real model reads the newest checkpoint, from this step.

        If the attempt dies in this method, the next attempt resumes from the same checkpoint with the Real model.
        """
        begin = time.perf_counter()
        self.checkpointer.wait()  # the main rank has now written the manifest
        # Free the Pseudo engine first: the memory need not hold both.
        self.engine.release()
        del self.engine, self.train_step
        free_memory(self.runtime.device)
        self.stage.enter_real()
        self._build_engine()
        checkpoint, problems = open_together(self.checkpointer.folder(self.step), self._show_loading)
        if checkpoint is None:
            raise StorageError("; ".join(problems))
        restore(self.engine, self.stage.reader(checkpoint), self._show_loading)
        self.stage_metrics.record_delinking(time.perf_counter() - begin)
        self._print(f"delinked {self.run.root} at step {self.step}: training continues with the Real model")

    def _announcements(self) -> Iterator[str]:
        """Yields how the run is divided over ranks, and its predicted memory and time.

        The prediction is based on a few of its micro-batches. For LoRA the numbers of trained and frozen parameters
        take its place.
        """
        config, ranks = self.config, self.runtime.world_size
        if config.pipeline is not None:
            yield config.pipeline.describe(config.model.num_layers)
        if config.tensor is not None:
            yield config.tensor.describe()
        if shares := config.batch_split(ranks).describe(config.deepspeed.train_batch_size):
            yield shares
        if config.m6.lora is not None:
            trained, total = count_trained(config)
            yield (
                f"LoRA of {', '.join(config.m6.lora.targets)}: trains {trained:,} parameters beside {total:,} frozen "
                "ones; memory and time are not predicted, because the planner knows no adapters"
            )
            return
        if self._forecast is not None:
            shape = BatchShape.of(*(self.data.micro_batch(index) for index in range(4)))
            for name, sharing in self.stage.stages_ahead():
                yield f"{name}{self._forecast.memory(shape, sharing)}"
        if memory_map := self.engine.memory_map():
            yield memory_map
        if self._forecast is not None:
            yield self._forecast.step(shape)

    def _replan_offloading(self) -> None:
        """Plans the offloading of experts again after the first steps of an attempt, from their measurements."""
        memory_map = self.engine.replan(self.run.root, self.step)
        if memory_map is not None:
            self._print(memory_map)

    def _save(self) -> float:
        if self.runtime.is_main:
            self.run.sync_metrics()  # after a power cut, a surviving checkpoint must have its metrics
        state = {
            "samples_seen": self.samples_seen,
            "tokens_seen": self.tokens_seen,
            **self.data.tokenizer_identities,
            "model": M6Config.of(self.config.model).to_diff_dict(),
            "lora": self.settings.lora and self.settings.lora.model_dump(),
            "any_world": self.config.sums_depend_on,
            NEXT_RATE: scheduled_rate(self.step, self.config),
            **self.stage.state(),
        }
        return self.checkpointer.save(self.engine, self.step, state)

    def _finish(self) -> bool:
        done = self.step == self.settings.training.total_steps
        if self.runtime.is_main and done:
            self.run.finish(self.step)
            if self._forecast is not None and (line := self._forecast.outcome()):
                self._print(line)
        self._print(f"{'finished' if done else 'stopped'} {self.run.root} at step {self.step}")
        return done

    def close(self) -> None:
        """Ends the thread of the checkpoints, and the trackers."""
        self.checkpointer.close()
        if self.trackers is not None:
            self.trackers.close()

    def _read_requests(self) -> Requests:
        """Returns the requests to this rank, by a signal or by a file in the run's folder."""
        main = self.runtime.is_main
        return Requests(
            stop=self.stop_flag.raised or (main and self.run.stop_requested()),
            save=main and self.run.save_requested(),
        )

    def _answer_save_request(self) -> None:
        """Removes RUN/SAVE when the checkpoint is complete, as a sign to the author of the file."""
        self.checkpointer.wait()
        if self.runtime.is_main:
            self.run.remove_save_request()

    def _write_progress(self) -> None:
        if self.runtime.is_main:
            self.run.write_progress(self.step, self.settings.training.total_steps)

    def _track(self, entry: dict[str, Any]) -> None:
        self.console.show(entry)
        if self.trackers is not None:
            self.trackers.write(entry)

    def _print(self, text: str) -> None:
        if self.runtime.is_main:
            print(text, file=sys.stderr, flush=True)


def pretrain(
    config: RunConfig,
    root: Path,
    runtime: Runtime,
    stop_flag: StopFlag | None = None,
    forecast: Forecast | None = None,
    restart: bool = False,
) -> bool:
    """Trains ``config`` in the folder ``root``, from its newest checkpoint if it has one.

    Args:
        root: the run's folder.
        stop_flag, forecast: see ``Trainer``.
        restart: begin at step 0 even if the folder has checkpoints, see ``RunDirectory.restart``.

    Returns:
        whether the run is finished.

    Raises:
        UserError: the configuration, the data or a checkpoint is wrong.
        StorageError: a file cannot be written or read, or another process trains the run.
    """
    run, signs = RunDirectory(root), LifeSigns(runtime)

    def open_run() -> None:
        # The previous job may have died with its node. Some file systems keep the lock of a dead node for minutes.
        run.lock.acquire(patience_s=240.0 if "M6_ATTEMPT_DIR" in os.environ else 0.0)
        if restart:
            run.restart()
        run.open(config, runtime.world_size, runtime.nodes)

    try:
        with signs.naming_the_lost():
            attest(config, runtime, restart)
            on_main_rank(open_run)
            check_shared((root, run.checkpoints), runtime)
        while True:
            # Closed only after a lost rank was named: the checkpoint's thread may wait for the part of this rank.
            with contextlib.ExitStack() as closing, signs.naming_the_lost():
                trainer = Trainer(config, run, runtime, stop_flag, forecast, may_restart=True)
                closing.callback(trainer.close)
                try:
                    return trainer.train()
                except PassingFault as fault:
                    if runtime.is_main:
                        print(f"warning: {fault}", file=sys.stderr, flush=True)
            trainer.engine.release()
            del trainer, closing
            free_memory(runtime.device)
    finally:
        signs.close()
        run.lock.release()
