"""The number formats of a run."""

from __future__ import annotations

from dataclasses import dataclass

from m6.config.run import RunConfig

FP32 = 4
"""Bytes of an fp32 number."""


@dataclass(frozen=True)
class Precision:
    """Bytes of an element.

    Attributes:
        weights: of the weights in the forward pass.
        compute: of the operands of matrix products.
        residual: of the residual stream.
    """

    weights: int
    compute: int
    residual: int

    @classmethod
    def of(cls, config: RunConfig) -> Precision:
        """The precision of a run: 16-bit, fp32, or fp32 under autocast."""
        if config.deepspeed.precision != "fp32":
            return cls(2, 2, 2)
        return cls(FP32, 2, FP32) if config.deepspeed.product_dtype == "bf16" else cls(FP32, FP32, FP32)

    def weight_copies(self, numel: int) -> int:
        """Bytes of autocast's 16-bit copies of ``numel`` weights; autograd keeps them with the product's input."""
        return 0 if self.compute == self.weights else numel * self.compute
