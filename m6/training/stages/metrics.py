"""The additional metrics of a Pseudo-to-Real run."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from m6.training.engine.engine import Engine
from m6.training.stages.stage import Stage

if TYPE_CHECKING:
    from m6.training.stages.layers import LayerGradients


class StageMetrics:
    """Compares the layers in some of the steps; reports nothing for a run without a Pseudo phase."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._gradients: LayerGradients | None = None
        self._entry: dict[str, Any] = {}

    def watch(self, engine: Engine, step: int) -> AbstractContextManager[Any]:
        """A context around the step after ``step`` steps. It collects the layers' gradients if a comparison is due."""
        self._gradients = None
        if not self._stage.measures(step):
            return contextlib.nullcontext()
        from m6.training.stages.layers import LayerGradients

        self._gradients = LayerGradients(engine.module)
        return self._gradients

    def measure(self, engine: Engine) -> list[float] | None:
        """Returns the correlations of adjacent layers' gradients in the finished step; None if none was due."""
        if self._gradients is None:
            return None
        correlations, self._gradients = self._gradients.correlations(), None
        self._entry["gradient_correlation"] = correlations
        sharing = self._stage.planned_sharing
        if not self._stage.is_pseudo and sharing is not None:
            from m6.training.stages.layers import layer_divergence

            self._entry["layer_divergence"] = layer_divergence(engine.module, sharing)
        return correlations

    def record_delinking(self, seconds: float) -> None:
        """Records the pause of the training by the switch to the Real model, in seconds."""
        self._entry["delink_s"] = seconds

    def finish(self, engine: Engine) -> dict[str, Any]:
        """Returns the metrics of a log interval and starts the next interval.

        Returns:
            {"stage": ...} with name: pseudo or real; switch_step: null before the switch; state_bytes: weights and
            optimizer state of this rank, on device and host. If measured in the interval: gradient_correlation of
            layers 0 and 1, 1 and 2, ...; layer_divergence of each layer; delink_s: seconds of the switch.
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
