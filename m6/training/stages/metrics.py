"""What a Pseudo-to-Real run reports beside what every run reports."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from m6.training.engine.engine import Engine
from m6.training.stages.layers import LayerGradients, layer_divergence
from m6.training.stages.stage import Stage


class StageMetrics:
    """Watches the steps in which the layers are compared; empty for a run that has no Pseudo stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._gradients: LayerGradients | None = None
        self._entry: dict[str, Any] = {}

    def watch(self, engine: Engine, step: int) -> AbstractContextManager[Any]:
        """Around the step after ``step`` steps: collects the layers' gradients if they are due."""
        self._gradients = LayerGradients(engine.module) if self._stage.measures(step) else None
        return self._gradients or contextlib.nullcontext()

    def measure(self, engine: Engine) -> list[float] | None:
        """After the step: how adjacent layers' gradients correlate; None if that was not due."""
        if self._gradients is None:
            return None
        correlations, self._gradients = self._gradients.correlations(), None
        self._entry["gradient_correlation"] = correlations
        sharing = self._stage.planned_sharing
        if not self._stage.is_pseudo and sharing is not None:
            self._entry["layer_divergence"] = layer_divergence(engine.module, sharing)
        return correlations

    def record_delinking(self, seconds: float) -> None:
        """Records for how many seconds the switch stopped the training."""
        self._entry["delink_s"] = seconds

    def finish(self, engine: Engine) -> dict[str, Any]:
        """For the entry of a log interval, and starts the next one.

        Returns:
            ``stage``: ``name``, pseudo or real; ``switch_step``, null until it is known; ``state_bytes`` that this
            rank holds in weights and optimizer state, offloaded or not; and what was measured in the interval:
            ``gradient_correlation`` of layers 0 and 1, 1 and 2, ..., ``layer_divergence`` of each layer, ``delink_s``.
        """
        if self._stage.settings is None:
            return {}
        entry, self._entry = self._entry, {}
        return {
            "stage": {
                "name": self._stage.name,
                "switch_step": self._stage.switch_step,
                "state_bytes": sum(engine.state_bytes().values()),
                **entry,
            }
        }
