"""The two phases of a Pseudo-to-Real run, and the rules for the end of the first phase.

A phase (Pseudo or Real) is called ``stage`` in keys and messages; pipeline stages are something else.

The procedure of M6-10T (arXiv 2110.03888) at the switch is not known to us, so the rule is a setting. The rule by
gradient correlation comes from a concurrent paper (arXiv 2110.03848, section 2).
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from m6.architecture.sharing import Sharing
from m6.checkpoints.delink import STATE, DelinkedReader, is_pseudo
from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from m6.config.run import RunConfig
from m6.config.sections import PseudoToRealSettings
from m6.errors import UserError
from m6.runs.processes import on_main_rank


class Stage:
    """The phase of a run; equal on all ranks. A run without ``m6.pseudo_to_real`` is always in the Real phase.

    Args:
        config: of the run.
        state: the state of the checkpoint to resume from; None: the run starts.

    Attributes:
        settings: the section ``m6.pseudo_to_real``.
        switch_step: number of steps of the Pseudo phase; None before the switch is decided.
        is_pseudo: whether the engine holds the Pseudo model.
        planned_sharing: the shared layers of the Pseudo phase; None if the run has no Pseudo phase.
    """

    def __init__(self, config: RunConfig, state: dict[str, Any] | None) -> None:
        self.settings = config.m6.pseudo_to_real
        saved = (state or {}).get(STATE, {})
        self.switch_step: int | None = saved.get("switch_step")
        # The checkpoint of the switch holds the Pseudo model and a switch_step: resuming delinks it.
        self.is_pseudo = self.settings is not None and self.switch_step is None
        self.planned_sharing = config.planned_sharing
        # Not possible if a rank has only a part of the layers. Interleaved micro-batches are in several layers at once.
        is_whole = config.pipeline is None and config.tensor is None
        self._compares_layers = is_whole and config.m6.training.overlap_micro_batches == 1
        self._rule = _make_rule(self.settings, saved.get("rule")) if self.settings is not None else None

    @property
    def sharing(self) -> Sharing | None:
        """The layers shared now; None in the Real phase."""
        return self.planned_sharing if self.is_pseudo else None

    @property
    def name(self) -> str:
        """``pseudo`` or ``real``."""
        return "pseudo" if self.is_pseudo else "real"

    def stages_ahead(self) -> list[tuple[str, Sharing | None]]:
        """Returns this phase and the following phase, each with a prefix for messages and its shared layers."""
        if self.settings is None:
            return [("", None)]
        pseudo: list[tuple[str, Sharing | None]] = [("Pseudo stage, ", self.sharing)] if self.is_pseudo else []
        return pseudo if self.settings.stop_at_switch else [*pseudo, ("Real stage, ", None)]

    @property
    def is_due(self) -> bool:
        """Whether the switch is decided, but the engine still holds the Pseudo model."""
        return self.is_pseudo and self.switch_step is not None

    @property
    def ends_job(self) -> bool:
        """Whether the job ends now, before the switch, because another JSON trains the Real phase."""
        return self.is_due and self.settings is not None and self.settings.stop_at_switch

    def reader(self, checkpoint: CheckpointReader) -> CheckpointReader:
        """Returns the reader of a checkpoint for this phase. In the Real phase it delinks a Pseudo checkpoint."""
        if self.settings is None or self.is_pseudo or not is_pseudo(checkpoint):
            return checkpoint
        return DelinkedReader(checkpoint.folder, self.settings.optimizer_state)

    def measures(self, step: int) -> bool:
        """Whether the layers' gradients are compared in the step after ``step`` steps."""
        if self.settings is None or not self._compares_layers:
            return False
        return (step + 1) % self.settings.correlation_interval_steps == 0

    def observe(self, step: int, loss: float, correlations: list[float] | None) -> None:
        """Decides after a step whether the Pseudo phase ends. Every rank calls this method.

        Args:
            step: number of finished steps.
            loss: of the global batch.
            correlations: see ``LayerGradients.correlations``; None: not measured.
        """
        if not self.is_pseudo or self.settings is None or self._rule is None:
            return
        # The rule must see every step, because it counts them. switch_step ends the phase in any case.
        decision = self._rule.observe(loss, self._within_groups(correlations))
        if _decision_of_main_rank(decision) or step >= self.settings.switch_step:
            self.switch_step = step

    def enter_real(self) -> None:
        """Records the switch: the engine holds the Real model from now on."""
        self.is_pseudo = False

    def learning_rate_factor(self, step: int) -> float:
        """Returns the factor on the schedule's learning rate of optimizer step ``step`` (the first is 0)."""
        if self.settings is None or self.is_pseudo or self.settings.rewarm_steps is None or self.switch_step is None:
            return 1.0
        return min(1.0, (step - self.switch_step + 1) / self.settings.rewarm_steps)

    def state(self) -> dict[str, Any]:
        """Returns the phase's part of a checkpoint's state; empty for a run without a Pseudo phase."""
        sharing = self.planned_sharing
        if sharing is None or self._rule is None:
            return {}
        return {
            STATE: {
                "stage": self.name,
                "switch_step": self.switch_step,
                "sharing": asdict(sharing),
                "rule": self._rule.state(),
            }
        }

    def _within_groups(self, correlations: list[float] | None) -> list[float] | None:
        """Returns the correlations of adjacent layers with shared weights. Only these are delinked from each other."""
        sharing = self.planned_sharing
        if correlations is None or sharing is None:
            return None
        return [
            value
            for layer, value in enumerate(correlations)
            if sharing.first_layer(layer) == sharing.first_layer(layer + 1)
        ]


def finished_pseudo_stage(config: RunConfig, checkpoints: Path) -> int | None:
    """Returns the steps of a finished Pseudo phase, if the JSON trains only this phase; otherwise None.

    It reads one manifest.

    Args:
        checkpoints: folder of the run's checkpoints.
    """
    settings, folders = config.m6.pseudo_to_real, complete_checkpoints(checkpoints)
    if settings is None or not settings.stop_at_switch or not folders:
        return None
    try:
        switch_step: int | None = CheckpointReader(folders[-1]).state[STATE]["switch_step"]
    except UserError:
        return None  # damaged: the run continues from the previous checkpoint
    return switch_step


class _Rule:
    """A rule for the end of the Pseudo phase. The base class, ``step``, never ends it before ``switch_step``."""

    def observe(self, loss: float, correlations: list[float] | None) -> bool | None:
        """Returns whether the phase ends; None without a new measurement. None is returned on all ranks or on none."""
        return None

    def state(self) -> dict[str, Any]:
        """The rule's part of a checkpoint's state."""
        return {}


class _LossPlateau(_Rule):
    """Ends the phase when the mean loss of a window of steps is hardly below the mean loss of the previous window."""

    def __init__(self, settings: PseudoToRealSettings, state: dict[str, Any]) -> None:
        self._settings = settings
        self._sum, self._count, self._before = state.get("sum", 0.0), state.get("count", 0), state.get("before")

    def observe(self, loss: float, correlations: list[float] | None) -> bool | None:
        if math.isfinite(loss):  # skipped steps do not count
            self._sum, self._count = self._sum + loss, self._count + 1
        if self._count < self._settings.plateau_window_steps:
            return None
        mean, before = self._sum / self._count, self._before
        self._sum, self._count, self._before = 0.0, 0, mean
        return None if before is None else mean > before * (1.0 - self._settings.plateau_improvement)

    def state(self) -> dict[str, Any]:
        return {"sum": self._sum, "count": self._count, "before": self._before}


class _GradientCorrelation(_Rule):
    """Ends the phase when most adjacent layers have low correlations in consecutive measurements (arXiv 2110.03848)."""

    def __init__(self, settings: PseudoToRealSettings, state: dict[str, Any]) -> None:
        self._settings = settings
        self._below = state.get("below", 0)

    def observe(self, loss: float, correlations: list[float] | None) -> bool | None:
        if not correlations:
            return None
        # Not None: other ranks may have finite correlations, and all ranks must take part in the decision.
        if not all(map(math.isfinite, correlations)):
            return False
        below = sum(value < self._settings.correlation_threshold for value in correlations)
        self._below = self._below + 1 if below > len(correlations) / 2 else 0
        return self._below >= self._settings.correlation_checks

    def state(self) -> dict[str, Any]:
        return {"below": self._below}


def _make_rule(settings: PseudoToRealSettings, state: dict[str, Any] | None) -> _Rule:
    if settings.switch == "loss_plateau":
        return _LossPlateau(settings, state or {})
    if settings.switch == "gradient_correlation":
        return _GradientCorrelation(settings, state or {})
    return _Rule()


def _decision_of_main_rank(decision: bool | None) -> bool:
    """Returns the main rank's decision. Otherwise rounding errors could make the ranks disagree.

    Args:
        decision: None on all ranks or on none.
    """
    return False if decision is None else on_main_rank(lambda: decision)
