"""The two stages of a Pseudo-to-Real run: which one it is in, and when the first one ends.

What M6-10T (arXiv 2110.03888) does at the switch is not known to us, so the rules are settings. The one that looks
at gradients is that of a concurrent paper (arXiv 2110.03848, section 2).
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from m6.checkpoints.delinked import STATE, DelinkedReader, is_pseudo
from m6.checkpoints.format import CheckpointReader
from m6.config.run import RunConfig
from m6.config.sections import PseudoToRealSettings
from m6.model.sharing import Sharing


class Stage:
    """Where a run stands; equal on all ranks. A run without the section is in the Real stage all the time.

    Args:
        config: of the run.
        state: of the checkpoint from which the run goes on, if any.

    Attributes:
        switch_step: steps that the Pseudo model was trained for; None while that is not decided.
        is_pseudo: whether the engine holds the Pseudo model.
    """

    def __init__(self, config: RunConfig, state: dict[str, Any] | None) -> None:
        self.settings = config.m6.pseudo_to_real
        saved = (state or {}).get(STATE, {})
        self.switch_step: int | None = saved.get("switch_step")
        # A checkpoint that was saved for the switch is of the Pseudo model: to go on from it is to delink it.
        self.is_pseudo = self.settings is not None and self.switch_step is None
        self._num_layers = config.model.num_layers
        self._rule = _make_rule(self.settings, saved.get("rule")) if self.settings is not None else None

    @property
    def sharing(self) -> Sharing | None:
        """What the layers share now."""
        return self.planned_sharing if self.is_pseudo else None

    @property
    def planned_sharing(self) -> Sharing | None:
        """What the layers share in the Pseudo stage of this run; None if it has none."""
        return None if self.settings is None else self.settings.sharing(self._num_layers)

    @property
    def name(self) -> str:
        return "pseudo" if self.is_pseudo else "real"

    def stages_ahead(self) -> list[tuple[str, Sharing | None]]:
        """What to call this stage and those that follow, and what the layers share in them."""
        if self.settings is None:
            return [("", None)]
        real: list[tuple[str, Sharing | None]] = [("Real stage, ", None)]
        return [("Pseudo stage, ", self.sharing), *real] if self.is_pseudo else real

    @property
    def is_due(self) -> bool:
        """The Pseudo stage has ended, but the engine still holds its model."""
        return self.is_pseudo and self.switch_step is not None

    def reader(self, checkpoint: CheckpointReader) -> CheckpointReader:
        """``checkpoint`` as the engine of this stage reads it: delinked, if it is of the other one."""
        if self.settings is None or self.is_pseudo or not is_pseudo(checkpoint):
            return checkpoint
        return DelinkedReader(checkpoint.folder, self.settings.optimizer_state)

    def measures(self, step: int) -> bool:
        """Whether the gradients of the layers are compared in the step after ``step`` steps."""
        return self.settings is not None and (step + 1) % self.settings.correlation_interval_steps == 0

    def observe(self, step: int, loss: float, correlations: list[float] | None) -> None:
        """Takes note of what step number ``step`` (the first is 1) did, and decides whether the stage ends with it.

        Args:
            loss: of the global batch.
            correlations: see ``LayerGradients.correlations``; None if they were not measured.
        """
        if not self.is_pseudo or self.settings is None or self._rule is None:
            return
        wanted = self._rule.observe(loss, self._within_groups(correlations))
        if _agreed(wanted) or step >= self.settings.switch_step:
            self.switch_step = step

    def enter_real(self) -> None:
        """To be called when the engine holds the Real model."""
        self.is_pseudo = False

    def learning_rate_factor(self, step: int) -> float:
        """By what the schedule's learning rate of optimizer step ``step`` (0 is the first) is multiplied."""
        if self.settings is None or self.is_pseudo or self.settings.rewarm_steps is None or self.switch_step is None:
            return 1.0
        return min(1.0, (step - self.switch_step + 1) / self.settings.rewarm_steps)

    def state(self) -> dict[str, Any]:
        """The stage for a checkpoint: empty for a run that has but one."""
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
        """Those of pairs of layers that share: the others have nothing to be delinked from each other."""
        sharing = self.planned_sharing
        if correlations is None or sharing is None:
            return None
        return [
            value
            for layer, value in enumerate(correlations)
            if sharing.first_layer(layer) == sharing.first_layer(layer + 1)
        ]


class _Rule:
    """When the Pseudo stage ends. This one, ``step``, leaves it to the number of steps."""

    def observe(self, loss: float, correlations: list[float] | None) -> bool | None:
        """Whether the stage shall end; None when there was nothing to decide on."""
        return None

    def state(self) -> dict[str, Any]:
        return {}


class _LossPlateau(_Rule):
    """The mean loss of a window of steps is hardly below that of the window before."""

    def __init__(self, settings: PseudoToRealSettings, state: dict[str, Any]) -> None:
        self._settings = settings
        self._sum, self._count, self._before = state.get("sum", 0.0), state.get("count", 0), state.get("before")

    def observe(self, loss: float, correlations: list[float] | None) -> bool | None:
        if math.isfinite(loss):  # a step that was skipped says nothing
            self._sum, self._count = self._sum + loss, self._count + 1
        if self._count < self._settings.plateau_window_steps:
            return None
        mean, before = self._sum / self._count, self._before
        self._sum, self._count, self._before = 0.0, 0, mean
        return None if before is None else mean > before * (1.0 - self._settings.plateau_improvement)

    def state(self) -> dict[str, Any]:
        return {"sum": self._sum, "count": self._count, "before": self._before}


class _GradientCorrelation(_Rule):
    """More than half of the adjacent layers disagree, in several measurements in a row (arXiv 2110.03848)."""

    def __init__(self, settings: PseudoToRealSettings, state: dict[str, Any]) -> None:
        self._settings = settings
        self._below = state.get("below", 0)

    def observe(self, loss: float, correlations: list[float] | None) -> bool | None:
        if not correlations or not all(map(math.isfinite, correlations)):
            return None
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


def _agreed(wanted: bool | None) -> bool:
    """The main rank's decision: the figures are sums over all ranks, but the ranks must not part over a last bit."""
    if wanted is None:
        return False
    decision = [wanted]
    dist.broadcast_object_list(decision, src=0)
    return decision[0]
