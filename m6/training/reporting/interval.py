"""Computes one line of metrics from the steps of a log interval."""

from __future__ import annotations

import time
from typing import Any

from m6.config.run import RunConfig
from m6.runs.processes import Runtime
from m6.training.reporting.outcome import StepOutcome
from m6.training.reporting.throughput import memory_bytes, peak_flops, training_flops


class IntervalReport:
    """Collects the outcomes of steps; ``finish`` returns their means and starts the next interval.

    The time of an interval excludes validation and sample images (``exclude``). It includes waits for data and for
    checkpoints. These are also reported separately.
    """

    def __init__(self, config: RunConfig, runtime: Runtime) -> None:
        self._runtime = runtime
        self._config = config
        self._peak = peak_flops(runtime.device, config.deepspeed.product_dtype)
        self._restart()

    def _restart(self) -> None:
        self._outcomes: list[StepOutcome] = []
        self._begin = time.perf_counter()
        self._excluded_s = self._data_wait_s = self._checkpoint_stall_s = 0.0

    def add(self, outcome: StepOutcome) -> None:
        """Adds a step."""
        self._outcomes.append(outcome)

    def add_data_wait(self, seconds: float) -> None:
        """Adds a step's wait for data, in seconds."""
        self._data_wait_s += seconds

    def exclude(self, seconds: float) -> None:
        """Subtracts seconds from the time of the interval."""
        self._excluded_s += seconds

    def add_checkpoint_stall(self, seconds: float) -> None:
        """Adds the stall of the training by a checkpoint, in seconds."""
        self._checkpoint_stall_s += seconds

    def finish(
        self, step: int, samples_seen: int, tokens_seen: int, experts_per_token: float | None = None
    ) -> dict[str, Any]:
        """Returns the entry for RUN/metrics.jsonl: losses in nats per target, times in seconds, memory in bytes.

        Args:
            experts_per_token: measured by ``ExpertHealth`` in the interval; None: a dense model.
        """
        outcomes = self._outcomes
        elapsed = time.perf_counter() - self._begin - self._excluded_s
        tokens = sum(outcome.tokens for outcome in outcomes)
        sums: dict[str, float] = {}
        targets: dict[str, float] = {}
        for outcome in outcomes:
            for name, count in outcome.result.targets.items():
                sums[name] = sums.get(name, 0.0) + outcome.result.loss_sums[name]
                targets[name] = targets.get(name, 0.0) + count
        pictures = sum(outcome.pictures for outcome in outcomes)
        pairs = sum(outcome.token_pairs for outcome in outcomes)
        # Model FLOPs leave out padding, recomputation and dropped choices.
        amounts = (tokens, sum(targets.values()), pictures, pairs, experts_per_token)
        speed = training_flops(self._config.model, *amounts) / elapsed
        entry = {
            "step": step,
            "time": time.time(),
            "samples_seen": samples_seen,
            "tokens_seen": tokens_seen,
            "loss": _mean([outcome.loss for outcome in outcomes]),
            "aux_loss": _mean([outcome.aux_loss for outcome in outcomes]),
            "objectives": {name: sums[name] / count for name, count in targets.items() if count},
            "learning_rate": outcomes[-1].learning_rate,
            "grad_norm": outcomes[-1].grad_norm,
            "skipped_steps": sum(outcome.skipped for outcome in outcomes),
            **({"loss_scale": outcomes[-1].loss_scale} if self._config.deepspeed.precision == "fp16" else {}),
            "bad_rows": sum(outcome.bad_rows for outcome in outcomes),
            "step_time_s": elapsed / len(outcomes),
            "data_wait_s": self._data_wait_s / len(outcomes),
            "checkpoint_stall_s": self._checkpoint_stall_s / len(outcomes),
            "tokens_per_second": tokens / elapsed,
            "samples_per_second": sum(outcome.samples for outcome in outcomes) / elapsed,
            "model_flops_per_second": speed,
            "mfu": None if self._peak is None else speed / (self._peak * self._runtime.world_size),
            "memory_bytes": memory_bytes(self._runtime.device),
        }
        self._restart()
        return entry


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
