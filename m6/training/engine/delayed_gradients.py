"""Delayed gradients, used one step late: W(t+1) = W(t) - lr u(g(W(t-1))) (arXiv 2006.09503, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m6.checkpoints.format import LATE_GRADIENT
from m6.training.deepspeed_private import base_optimizer, create_moments, publish_weights

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class DelayedGradients:
    """The stored gradients of the last step, to be used at the end of the next step.

    Step t computes with W(t-1). This needs no second copy of the weights, because the gradient between W(t-1) and W(t)
    is stored instead. It is reduced, clipped and without loss scale, as DeepSpeed passes it to the optimizer. At ZeRO
    stages 1 and 2 it is this rank's partition. It is stored in the optimizer's state, so that checkpoints treat it like
    a moment.

    Attributes:
        learning_rate: the learning rate for the stored gradients, from their own step; None: nothing is stored.
    """

    def __init__(self, deepspeed: DeepSpeedEngine) -> None:
        self._deepspeed, self._optimizer = deepspeed, base_optimizer(deepspeed)
        # One permanent buffer for each parameter: DeepSpeed keeps views of the optimizer's state from the first step.
        self._buffers: dict[Tensor, Tensor] = {}
        self.learning_rate: float | None = None
        self._used = False

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """A context in which the optimizer's ``step`` applies the stored gradients and stores the new gradients."""
        self._make_room()
        optimizer, self._used = self._optimizer, False
        optimizer.step = self._exchange  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            del optimizer.step

    def end_step(self, learning_rate: float, skipped: bool) -> None:
        """Ends a step with this learning rate. A skipped step loses only its own gradients, not the stored ones."""
        if not skipped:
            self.learning_rate = learning_rate
            return
        if not self._used:  # DeepSpeed did not call the optimizer
            self.use()
        self._forget()

    def use(self) -> None:
        """Updates the weights with the stored gradients, if there are any. Call it between two steps."""
        if self.learning_rate is not None:
            self._update()
            self._forget()
            publish_weights(self._deepspeed)

    def expect(self, learning_rate: float) -> None:
        """Allocates room for the stored gradients of a checkpoint, before they are written into the fragments."""
        self._make_room()
        for parameter in self._parameters():
            self._optimizer.state[parameter][LATE_GRADIENT] = self._buffers[parameter]
        self.learning_rate = learning_rate

    def _make_room(self) -> None:
        create_moments(self._deepspeed)  # first: an optimizer creates its moments only for a parameter without state
        if not self._buffers:
            self._buffers = {parameter: torch.zeros_like(parameter) for parameter in self._parameters()}

    def _exchange(self) -> None:
        """Replaces the optimizer's step. ZeRO stages 1 and 2 call it separately for each parameter group."""
        arrived = {parameter: parameter.grad for parameter in self._parameters()}
        if self.learning_rate is not None:
            self._update()
        for parameter, gradient in arrived.items():
            buffer = self._buffers[parameter]
            self._optimizer.state[parameter][LATE_GRADIENT] = buffer
            # Zeros for an unused parameter, as DeepSpeed's sums over several ranks have.
            _ = buffer.zero_() if gradient is None else buffer.copy_(gradient)
        self._used = True

    def _update(self) -> None:
        """Runs the optimizer's own step with the stored gradients."""
        assert self.learning_rate is not None
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = self.learning_rate * group.get("lr_ratio", 1.0)
            for parameter in group["params"]:
                parameter.grad = self._optimizer.state[parameter].pop(LATE_GRADIENT)
        type(self._optimizer).step(self._optimizer)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            for parameter in group["params"]:
                parameter.grad = None

    def _forget(self) -> None:
        for parameter in self._parameters():
            self._optimizer.state[parameter].pop(LATE_GRADIENT, None)
        self.learning_rate = None

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
