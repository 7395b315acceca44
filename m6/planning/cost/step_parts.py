"""Seconds by part: of a step, and of one micro-batch in one layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StepTime:
    """Seconds of the slowest rank.

    Attributes:
        matmul: matrix products, except those of experts.
        experts: grouped matrix products of experts.
        elementwise: all other operators, which memory bandwidth limits.
        launch: the least time of each operator.
        exchange: of tokens to the experts and back, as far as computation does not hide it; all-reduces of tensor
            parallelism.
        reduction: all-reduce of gradients and all-gather of weights.
        update: the optimizer on the device.
        host: transfers between host and device, and the update on the host, as far as computation does not hide them.
        bubble: waits of a pipeline for other stages and for messages from them.
    """

    matmul: float = 0.0
    experts: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    exchange: float = 0.0
    reduction: float = 0.0
    update: float = 0.0
    host: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def compute(self) -> float:
        """Seconds of all operators of forward and backward passes."""
        return self.matmul + self.experts + self.elementwise + self.launch

    def parts(self) -> dict[str, float]:
        """The seconds by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def sum_of(cls, times: Iterable[StepTime]) -> StepTime:
        """The sum, part by part."""
        each = list(times)
        return cls(*(sum(getattr(time, field.name) for time in each) for field in fields(cls)))


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one micro-batch in one layer, in the embeddings, or in the head.

    Attributes:
        parts: of all passes.
        passes: their cost in forward passes: a backward pass costs two, recomputation one more.
    """

    parts: StepTime
    passes: int

    @property
    def total(self) -> float:
        """Seconds of all passes."""
        return self.parts.compute + self.parts.exchange

    @property
    def forward(self) -> float:
        """Seconds of the forward pass. Tokens go to experts and back once in each pass, backward and again forward."""
        return self.parts.compute / self.passes + self.parts.exchange / (self.passes - 1)

    @property
    def weight(self) -> float:
        """Seconds of the gradients of weights, where they can come later: those of experts come with the inputs'."""
        return self.parts.matmul / self.passes
