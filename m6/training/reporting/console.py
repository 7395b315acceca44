"""The progress display of a run: lines in a log, or a progress bar in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm import tqdm

from m6.formatting import log_line


class Console:
    """Shows the progress of a run on stderr. Use it as a context manager.

    Without a terminal, each entry of metrics is a line. A line of training has the step, the loss and the losses of
    objectives, tokens per second and the remaining time; with several ranks also the slowest rank; and if a capacity
    drops choices, also the mean number of experts for a token. A line of validation has the losses of objectives and of
    their sources. With a terminal, a progress bar shows the same facts.

    Args:
        name: name of the run.
        total_steps: steps of the whole run.
        first_step: steps finished by earlier attempts.
        enabled: whether this process shows anything.
    """

    def __init__(self, name: str, total_steps: int, first_step: int, enabled: bool) -> None:
        self._total, self._step, self._enabled = total_steps, first_step, enabled
        self._facts = self._validation = ""
        hidden = None if enabled else True  # None: tqdm shows the bar only in a terminal
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step", desc=name, disable=hidden)

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self) -> None:
        """Counts a finished step."""
        self._step += 1
        self._bar.update()

    def show(self, entry: Mapping[str, Any]) -> None:
        """Shows a line of RUN/metrics.jsonl: of training, or of validation."""
        if "validation" in entry:
            self._validation = f"validation {_losses(entry['validation'], entry.get('validation_by_source', {}))}"
            self._print(f"step {self._step:,}: {self._validation}")
        elif "step_time_s" in entry:
            self._facts = (
                f"loss {_number(entry['loss'])} ({_losses(entry['objectives'])}), "
                f"{entry['tokens_per_second']:,.0f} tokens/s{_experts(entry)}"
            )
            if slowest := entry.get("slowest_rank"):
                self._facts += (
                    f", slowest rank {slowest['rank']} on {slowest['node']} with {slowest['step_time_s']:.3f} s a step "
                    f"(mean {slowest['mean_step_time_s']:.3f} s, data {slowest['data_wait_s']:.3f} s)"
                )
            left = _duration(entry["step_time_s"] * (self._total - self._step))
            self._print(f"step {self._step:,} of {self._total:,}: {self._facts}, {left} left")
        self._bar.set_postfix_str("; ".join(filter(None, (self._facts, self._validation))), refresh=False)

    def draws(self, step: int) -> None:
        """Shows the start of drawing samples, because this can take minutes."""
        self._print(f"step {step:,}: draws samples")

    def saved(self, step: int, stall_s: float) -> None:
        """Shows that a checkpoint was taken (its files may still be written), and the stall of the training."""
        self._print(f"step {step:,}: saves a checkpoint; training waited for {stall_s:.1f} s")

    def _print(self, line: str) -> None:
        if self._enabled and self._bar.disable:
            log_line(line)


def _losses(losses: Mapping[str, Any], by_source: Mapping[str, Mapping[str, float]] | None = None) -> str:
    """Such as ``language_modelling 3.125 (news 3.000, poems 3.250), image_captioning 2.000``."""
    parts = []
    for name, value in losses.items():
        of_sources = (by_source or {}).get(name)
        # With one source, its loss equals the loss of the objective.
        parts.append(
            f"{name} {_number(value)}" + (f" ({_losses(of_sources)})" if of_sources and len(of_sources) > 1 else "")
        )
    return ", ".join(parts)


def _experts(entry: Mapping[str, Any]) -> str:
    """Such as ``, 1.250 experts a token, 77.9% of tokens without one``; empty if nothing is dropped."""
    if not entry.get("dropped_fraction"):
        return ""
    without = entry["tokens_without_expert"]
    return f", {_number(entry['experts_per_token'])} experts a token, {without:.1%} of tokens without one"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _duration(seconds: float) -> str:
    """Such as 3 d 4:05:06."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days} d " * (days > 0) + f"{hour}:{minute:02}:{second:02}"
