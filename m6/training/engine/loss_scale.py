"""The loss scale of ZeRO's optimizer for fp16; written for DeepSpeed 0.19.8."""

from __future__ import annotations

from typing import Any

# The rest of the scaler's attributes are settings.
_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """The factor on the loss. It keeps small gradients in the range of fp16; it is 1 in other precisions.

    DeepSpeed changes the scale before it divides the gradients by it, so a growing scale would halve the gradients of
    this step. Here ``change`` changes it at the end of the step. If a gradient overflows at the smallest scale,
    ``NonfinitePolicy`` ends the run with the reason, instead of DeepSpeed.

    Args:
        zero: the optimizer of a DeepSpeed engine at ZeRO stage 1, 2 or 3.
    """

    def __init__(self, zero: Any) -> None:
        self._scaler = zero.loss_scaler
        self._scaler.raise_error_at_min_scale = False

        def change_nothing(has_overflow: bool = False) -> None:
            pass

        zero._update_scale = change_nothing

    @property
    def value(self) -> float:
        """The scale of the gradients of the current step."""
        return float(self._scaler.cur_scale)

    def change(self, skipped: bool) -> None:
        """Ends a step. The scale falls after skipped steps, and grows after many steps without a skip."""
        self._scaler.update_scale(skipped)

    def state(self) -> dict[str, Any]:
        """Returns the scaler's state as JSON; empty if the scale is constant."""
        return {key: getattr(self._scaler, key) for key in _STATE} if self._scaler.dynamic else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the result of ``state``."""
        for key in _STATE:
            if key in state:
                setattr(self._scaler, key, state[key])
