"""The functions between the two matrices of an expert, with their derivatives, writing to given memory."""

from typing import Protocol

import torch
from torch import Tensor

aten = torch.ops.aten


class Activation(Protocol):
    """``inputs_per_unit`` values of the inner product h go into one hidden unit."""

    inputs_per_unit: int

    def forward(self, h: Tensor, out: Tensor) -> Tensor:
        """h [R, inputs_per_unit * F] -> out [R, F]."""

    def backward(self, grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        """The gradient of h from that of the output [R, F]; ``out`` is shaped like h and may be ``grad``'s memory."""


class Gelu:
    """x Phi(x), exact: Hendrycks and Gimpel, arXiv 1606.08415."""

    inputs_per_unit = 1

    def forward(self, h: Tensor, out: Tensor) -> Tensor:
        return aten.gelu.out(h, out=out)

    def backward(self, grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        return aten.gelu_backward.grad_input(grad, h, grad_input=out)


class Relu:
    """max(x, 0)."""

    inputs_per_unit = 1

    def forward(self, h: Tensor, out: Tensor) -> Tensor:
        return aten.relu.out(h, out=out)

    def backward(self, grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        return aten.threshold_backward.grad_input(grad, h, 0, grad_input=out)


class SwiGlu:
    """silu(g) * u for h = (g, u): Shazeer, arXiv 2002.05202, equation 5."""

    inputs_per_unit = 2

    def forward(self, h: Tensor, out: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return aten.silu.out(gate, out=out).mul_(up)

    def backward(self, grad: Tensor, h: Tensor, out: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        out_gate, out_up = out.chunk(2, dim=-1)
        torch.mul(grad, up, out=out_gate)
        aten.silu_backward.grad_input(out_gate, gate, grad_input=out_gate)
        aten.silu.out(gate, out=out_up).mul_(grad)
        return out


ACTIVATIONS: dict[str, Activation] = {"gelu": Gelu(), "relu": Relu(), "swiglu": SwiGlu()}
