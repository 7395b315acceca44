"""Activation functions of experts and their derivatives. They write to the caller's memory."""

from typing import Protocol

import torch
from torch import Tensor

aten = torch.ops.aten


class Activation(Protocol):
    """An activation function; each hidden unit is computed from ``inputs_per_unit`` values of h = w_in x + b_in."""

    inputs_per_unit: int

    def forward(self, h: Tensor, out: Tensor) -> Tensor:
        """Writes the activation of h [R, inputs_per_unit * F] to ``out`` [R, F] and returns it."""

    def backward(self, grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        """Writes the gradient of h to ``out`` and returns it.

        Args:
            grad: [R, F], the gradient of the output.
            h: [R, inputs_per_unit * F].
            out: has the shape of h, and may be ``grad`` itself if the shapes are equal.
        """


class Gelu:
    """x Phi(x), exact: Hendrycks and Gimpel, arXiv 1606.08415."""

    inputs_per_unit = 1

    def forward(self, h: Tensor, out: Tensor) -> Tensor:
        """See ``Activation``."""
        return aten.gelu.out(h, out=out)

    def backward(self, grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        """See ``Activation``."""
        return aten.gelu_backward.grad_input(grad, h, grad_input=out)


class Relu:
    """max(x, 0)."""

    inputs_per_unit = 1

    def forward(self, h: Tensor, out: Tensor) -> Tensor:
        """See ``Activation``."""
        return aten.relu.out(h, out=out)

    def backward(self, grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        """See ``Activation``."""
        return aten.threshold_backward.grad_input(grad, h, 0, grad_input=out)


class SwiGlu:
    """silu(g) * u for h = (g, u): Shazeer, arXiv 2002.05202, equation 5."""

    inputs_per_unit = 2

    def forward(self, h: Tensor, out: Tensor) -> Tensor:
        """See ``Activation``."""
        gate, up = h.chunk(2, dim=-1)
        return aten.silu.out(gate, out=out).mul_(up)

    def backward(self, grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        """See ``Activation``."""
        gate, up = h.chunk(2, dim=-1)
        out_gate, out_up = out.chunk(2, dim=-1)
        torch.mul(grad, up, out=out_gate)
        aten.silu_backward.grad_input(out_gate, gate, grad_input=out_gate)
        aten.silu.out(gate, out=out_up).mul_(grad)
        return out


ACTIVATIONS: dict[str, Activation] = {"gelu": Gelu(), "relu": Relu(), "swiglu": SwiGlu()}
