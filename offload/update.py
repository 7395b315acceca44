"""The optimizers' arithmetic on one chunk, the same to the bit wherever the chunk lies.

The compiled kernel and the PyTorch code below do the same operations in the same order, each rounded to fp32 by
itself. Where chunks that the device owns are updated there, and the others on the host, that is what makes the
placement invisible in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from offload.kernel import load_kernel

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BESIDE_MASTER = 3  # a bfloat16 weight whose master is whole
_EPSILON_GRADIENT, _EPSILON_SCALE = torch.finfo(torch.float32).eps, 1e-3


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer of the offloaded parameters.

    Attributes:
        kind: ``adamw`` (Loshchilov and Hutter 2019, arXiv 1711.05101); ``adafactor`` (Shazeer and Stern 2018,
            arXiv 1804.04235), with one row and one column of second moments per matrix, PyTorch's defaults and no
            first moment; ``sgd`` with momentum.
        beta1, beta2, epsilon: AdamW's.
        beta2_decay, clipping_threshold: Adafactor's.
        momentum: SGD's; 0 keeps no state.
        weight_decay: decoupled; times the learning rate; of matrices, not of vectors.
        split_master: a bfloat16 weight is the upper half of its fp32 master and not beside it; equal to the bit.
    """

    kind: Literal["adamw", "adafactor", "sgd"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    beta2_decay: float = -0.8
    clipping_threshold: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    split_master: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "adafactor", "sgd"):
            raise ValueError(f"kind is {self.kind!r}; expected adamw, adafactor or sgd")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0 and below 1")
        for name in ("epsilon", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0")

    def states(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The fp32 states of a stack of matrices [N, rows, columns] or vectors [N, numel]: name -> shape.

        Adafactor takes a vector for a matrix of one row.
        """
        if self.kind == "adamw":
            return {"exp_avg": tuple(shape), "exp_avg_sq": tuple(shape)}
        if self.kind == "adafactor":
            columns = (*shape[:-2], 1, shape[-1]) if len(shape) > 2 else tuple(shape)
            return {"row_var": (*shape[:-1], 1), "col_var": columns}
        return {"momentum_buffer": tuple(shape)} if self.momentum else {}


def rest_dtype(dtype: torch.dtype, split_master: bool = True) -> torch.dtype | None:
    """The type of what a weight of ``dtype`` needs beside it to be known in fp32.

    bfloat16 is the upper half of fp32, so the lower 16 bits are enough ("split master"): 4 bytes a parameter instead
    of 6. The upper half is rounded half up, which tells from the lower half alone whether it was rounded up. It
    differs from PyTorch's rounding at exact ties only. A whole master beside it is rounded in the same way.
    """
    if not split_master and dtype != torch.float32:
        return torch.float32
    return {torch.float32: None, torch.bfloat16: torch.int16, torch.float16: torch.float32}[dtype]


def read_master(weight: Tensor, rest: Tensor | None) -> Tensor:
    """The fp32 values; the weight itself where it is fp32."""
    if weight.dtype == torch.float32:
        return weight
    assert rest is not None
    if rest.dtype == torch.float32:
        return rest
    lower = rest.to(torch.int32) & 0xFFFF
    upper = weight.view(torch.int16).to(torch.int32) - (lower >> 15)
    return (upper << 16 | lower).view(torch.float32)


def write_master(value: Tensor, weight: Tensor, rest: Tensor | None) -> None:
    """Stores fp32 values as a weight and what it needs beside it."""
    if weight.dtype == torch.float32:
        weight.copy_(value)
        return
    assert rest is not None
    if weight.dtype == torch.float16:
        rest.copy_(value)
        weight.copy_(value)
        return
    bits = value.view(torch.int32)
    # Beyond the largest value the sum wraps into the sign: only the bits matter, and those are right.
    weight.view(torch.int16).copy_(((bits + 0x8000) >> 16).to(torch.int16))
    rest.copy_(value if rest.dtype == torch.float32 else bits.to(torch.int16))


def sum_of_squares(values: Tensor) -> float:
    """In double precision, on the host by the compiled kernel."""
    kernel = load_kernel() if values.device.type == "cpu" else None
    if kernel is None:
        return float(values.double().square().sum())
    return float(kernel.sum_of_squares(values.numel(), values.data_ptr(), _DTYPE_CODES[values.dtype]))


@torch.no_grad()
def update(
    settings: OptimizerSettings,
    step: int,
    learning_rate: float,
    coefficient: float,
    weight: Tensor,
    rest: Tensor | None,
    gradient: Tensor,
    states: Mapping[str, Tensor],
) -> None:
    """Applies one step to a contiguous stack of matrices or vectors, in place.

    Args:
        step: the number of this update, from 1.
        coefficient: multiplies the gradient: loss scale and clipping.
        weight: [N, rows, columns] or [N, numel], as the model computes with it.
        rest: what ``rest_dtype`` says, in the same shape.
        gradient: the same shape, fp32 or 16 bits.
        states: as ``OptimizerSettings.states``.
    """
    if weight.dim() == 2 and settings.weight_decay:
        settings = replace(settings, weight_decay=0.0)
    if settings.kind == "adafactor":
        rests = [None] * len(weight) if rest is None else rest.unbind(0)
        rows, columns = states["row_var"].unbind(0), states["col_var"].unbind(0)
        for own, own_rest, grad, row, column in zip(
            weight.unbind(0), rests, gradient.unbind(0), rows, columns, strict=True
        ):
            flat = None if own_rest is None else _matrix(own_rest)
            own, grad, row, column = (_matrix(part) for part in (own, grad, row, column))
            _adafactor(settings, step, learning_rate, coefficient, own, flat, grad, row, column)
        return
    keep = 1 - learning_rate * settings.weight_decay
    if settings.kind == "adamw":
        buffers = [states["exp_avg"], states["exp_avg_sq"]]
        scalars = [
            keep,
            *(settings.beta1, 1 - settings.beta1),
            *(settings.beta2, 1 - settings.beta2),
            1 / math.sqrt(1 - settings.beta2**step),
            settings.epsilon,
            learning_rate / (1 - settings.beta1**step),
        ]
    else:
        buffers = [states["momentum_buffer"]] if settings.momentum else []
        scalars = [keep, settings.momentum, learning_rate]
    kernel = load_kernel() if weight.device.type == "cpu" else None
    if kernel is None:
        compute = _adamw if settings.kind == "adamw" else _sgd
        master = compute(read_master(weight, rest), gradient.float() * coefficient, buffers, scalars)
        write_master(master, weight, rest)
        return
    beside = weight.dtype == torch.bfloat16 and rest is not None and rest.dtype == torch.float32
    (kernel.adamw if settings.kind == "adamw" else kernel.sgd)(
        weight.numel(),
        _BESIDE_MASTER if beside else _DTYPE_CODES[weight.dtype],
        weight.data_ptr(),
        None if rest is None else rest.data_ptr(),
        gradient.data_ptr(),
        _DTYPE_CODES[gradient.dtype],
        *([buffer.data_ptr() for buffer in buffers] if buffers else [None]),
        coefficient,
        *scalars,
    )


def _adamw(master: Tensor, gradient: Tensor, buffers: Sequence[Tensor], scalars: Sequence[float]) -> Tensor:
    mean, square = buffers
    keep, beta1, rest1, beta2, rest2, inverse_root, epsilon, step_size = scalars
    mean.mul_(beta1).add_(gradient * rest1)
    square.mul_(beta2).add_((gradient * gradient) * rest2)
    # In double and rounded once, since PyTorch's fp32 square root on a CPU is up to one unit off in its last place.
    denominator = square.double().sqrt_().float().mul_(inverse_root).add_(epsilon)
    return master * keep - (mean / denominator).mul_(step_size)


def _sgd(master: Tensor, gradient: Tensor, buffers: Sequence[Tensor], scalars: Sequence[float]) -> Tensor:
    keep, momentum, rate = scalars
    for buffer in buffers:
        gradient = buffer.mul_(momentum).add_(gradient)
    return master * keep - gradient * rate


def _matrix(part: Tensor) -> Tensor:
    """A vector is a matrix of one row."""
    return part if part.dim() == 2 else part.view(1, -1)


def _adafactor(
    settings: OptimizerSettings,
    step: int,
    learning_rate: float,
    coefficient: float,
    weight: Tensor,
    rest: Tensor | None,
    gradient: Tensor,
    row: Tensor,
    column: Tensor,
) -> None:
    """One matrix [rows, columns] by itself: a sum over a stack could round differently for another chunk size."""
    master = read_master(weight, rest)
    gradient = gradient.float() * coefficient
    squares = gradient.square()
    share = step**settings.beta2_decay
    row.lerp_(squares.mean(-1, keepdim=True), share)
    column.lerp_(squares.mean(-2, keepdim=True), share)
    variance = (row @ column) / row.mean().clamp(min=_EPSILON_GRADIENT)
    change = gradient * variance.clamp_(min=_EPSILON_GRADIENT**2).rsqrt_()
    scale = max(_EPSILON_SCALE, math.sqrt(sum_of_squares(master) / master.numel()))
    rate = scale * min(learning_rate, 1 / math.sqrt(step))
    size = math.sqrt(sum_of_squares(change) / change.numel())
    rate /= max(1.0, size / settings.clipping_threshold)
    write_master(master * (1 - learning_rate * settings.weight_decay) - change * rate, weight, rest)
