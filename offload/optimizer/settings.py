"""The settings of the offloaded parameters' optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MUON_ITERATIONS = 5
"""Iterations that make the matrix of an update orthogonal."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer of the offloaded parameters and its constants.

    Attributes:
        kind: ``adamw`` (Loshchilov and Hutter 2019, arXiv 1711.05101); ``adafactor`` (Shazeer and Stern 2018,
            arXiv 1804.04235), with one row and one column of second moments for each matrix, PyTorch's defaults and no
            first moment; ``sgd``; ``muon`` (Jordan et al. 2024) for matrices, with AdamW for vectors.
        beta1, beta2, epsilon: constants of AdamW.
        beta2_decay, clipping_threshold: constants of Adafactor.
        momentum: of SGD, which has no state with 0, and of Muon.
        vector_rate: Muon: the factor of the learning rate for vectors.
        weight_decay: decoupled, and multiplied by the learning rate. Vectors are not decayed.
        masters: keep fp32 masters of 16-bit weights. False: updates round the weights stochastically.

    Raises:
        ValueError: a value is not in its range; the message names the field.
    """

    kind: Literal["adamw", "adafactor", "sgd", "muon"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    beta2_decay: float = -0.8
    clipping_threshold: float = 1.0
    momentum: float = 0.0
    vector_rate: float = 1.0
    weight_decay: float = 0.0
    masters: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "adafactor", "sgd", "muon"):
            raise ValueError(f"kind is {self.kind!r}; expected adamw, adafactor, sgd or muon")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0 and below 1")
        for name in ("epsilon", "weight_decay", "vector_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0")

    def states(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the fp32 states of a stack of matrices [N, rows, columns] or vectors [N, numel].

        Adafactor treats a vector as a matrix with one row.
        """
        if self.kind == "adamw" or (self.kind == "muon" and len(shape) == 2):
            return {"exp_avg": tuple(shape), "exp_avg_sq": tuple(shape)}
        if self.kind == "adafactor":
            columns = (*shape[:-2], 1, shape[-1]) if len(shape) > 2 else tuple(shape)
            return {"row_var": (*shape[:-1], 1), "col_var": columns}
        return {"momentum_buffer": tuple(shape)} if self.momentum or self.kind == "muon" else {}

    def state_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one of ``states``, or [N, 0] if a stack of this shape does not have it."""
        return self.states(shape).get(name, (shape[0], 0))
