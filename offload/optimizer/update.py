"""The optimizers' arithmetic on one chunk, bit-identical on the host and on the device.

The compiled kernel and the PyTorch code below do the same operations in the same order, and round each to fp32. So the
weights do not depend on the chunks owned and updated by the device. Adafactor's sums over a matrix are taken in double,
in another order on a GPU: there the last bit of a mean may differ. So may the last bits of Muon's products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offload.optimizer.master_weights import DTYPE_CODES, load_kernel, read_master, write_master
from offload.optimizer.orthogonal import orthogonal, update_scale
from offload.optimizer.settings import OptimizerSettings

# PyTorch's defaults for Adafactor, eps=(None, 1e-3): None is the epsilon of the type.
_EPSILON_GRADIENT, _EPSILON_SCALE = torch.finfo(torch.float32).eps, 1e-3


def sum_of_squares(values: Tensor) -> float:
    """Returns the sum of squares in double precision; the compiled kernel computes it on the host."""
    kernel = load_kernel() if values.device.type == "cpu" else None
    if kernel is None:
        return float(values.double().square().sum())
    return float(kernel.sum_of_squares(values.numel(), values.data_ptr(), DTYPE_CODES[values.dtype]))


@torch.no_grad()
def update(
    settings: OptimizerSettings,
    step: int,
    learning_rate: float,
    coefficient: float,
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    states: Mapping[str, Tensor],
    target: Tensor | None = None,
) -> None:
    """Updates a contiguous stack of matrices or vectors.

    Args:
        step: the number of this update, from 1.
        coefficient: the factor of the gradient, from loss scale and clipping.
        weight: [N, rows, columns] or [N, numel], in the model's type.
        remainder: of the same shape and the type ``remainder_dtype``. None: the weights are fp32, or 16-bit without
            masters and rounded stochastically.
        gradient: of the same shape, in fp32 or a 16-bit type.
        states: by name, with the shapes of ``OptimizerSettings.states``; updated in place, as the remainder.
        target: gets the new weights, and may be the gradient's memory; None: they replace the old ones.
    """
    target = weight if target is None else target
    if weight.dim() == 2 and settings.weight_decay:  # vectors
        settings = replace(settings, weight_decay=0.0)
    if settings.kind == "muon" and weight.dim() == 2:
        settings, learning_rate = replace(settings, kind="adamw"), learning_rate * settings.vector_rate
    if settings.kind in ("muon", "adafactor"):
        compute_one = _muon if settings.kind == "muon" else _adafactor
        remainders = [None] * len(weight) if remainder is None else remainder.unbind(0)
        stacks = (weight, gradient, *(states[name] for name in settings.states(weight.shape)), target)
        for own_remainder, *parts in zip(remainders, *(stack.unbind(0) for stack in stacks), strict=True):
            flat = None if own_remainder is None else _matrix(own_remainder)
            own, *others = map(_matrix, parts)
            compute_one(settings, step, learning_rate, coefficient, own, flat, *others)
        return
    # All scalars are computed in double precision here, so the kernel and PyTorch get the same fp32 numbers.
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
        master = compute(read_master(weight, remainder), gradient.float() * coefficient, buffers, scalars)
        write_master(master, target, remainder, step)
        return
    (kernel.adamw if settings.kind == "adamw" else kernel.sgd)(
        weight.numel(),
        *_arguments(weight, target, remainder, gradient, step),
        *([buffer.data_ptr() for buffer in buffers] if buffers else [None]),
        coefficient,
        *scalars,
    )


def _arguments(
    weight: Tensor, target: Tensor, remainder: Tensor | None, gradient: Tensor, step: int
) -> list[int | None]:
    """The arguments of every kernel after the number of elements or rows."""
    rest = None if remainder is None else remainder.data_ptr()
    weights = [DTYPE_CODES[weight.dtype], weight.data_ptr(), target.data_ptr(), rest]
    return [*weights, gradient.data_ptr(), DTYPE_CODES[gradient.dtype], step]


def _adamw(master: Tensor, gradient: Tensor, buffers: Sequence[Tensor], scalars: Sequence[float]) -> Tensor:
    mean, square = buffers
    keep, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, epsilon, step_size = scalars
    mean.mul_(beta1).add_(gradient * one_minus_beta1)
    square.mul_(beta2).add_((gradient * gradient) * one_minus_beta2)
    # In double, rounded once: PyTorch's fp32 square root on a CPU is wrong by up to one unit in the last place.
    denominator = square.double().sqrt_().float().mul_(inverse_root).add_(epsilon)
    return master * keep - (mean / denominator).mul_(step_size)


def _sgd(master: Tensor, gradient: Tensor, buffers: Sequence[Tensor], scalars: Sequence[float]) -> Tensor:
    keep, momentum, rate = scalars
    for buffer in buffers:
        gradient = buffer.mul_(momentum).add_(gradient)
    return master * keep - gradient * rate


def _muon(
    settings: OptimizerSettings,
    step: int,
    learning_rate: float,
    coefficient: float,
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    momentum: Tensor,
    target: Tensor,
) -> None:
    """Updates one matrix [rows, columns].

    The products are in fp32, of one matrix at a time: products of a stack could round differently for another chunk
    size.
    """
    gradient = gradient.float() * coefficient
    momentum.lerp_(gradient, 1 - settings.momentum)
    direction = gradient.lerp_(momentum, settings.momentum)
    rows, columns = direction.shape
    change = orthogonal(direction[None], torch.float32)[0].mul_(learning_rate * update_scale((rows, columns)))
    keep = 1 - learning_rate * settings.weight_decay
    write_master(read_master(weight, remainder) * keep - change, target, remainder, step)


def _matrix(part: Tensor) -> Tensor:
    """Returns a vector as a matrix with one row."""
    return part if part.dim() == 2 else part.view(1, -1)


def _adafactor(
    settings: OptimizerSettings,
    step: int,
    learning_rate: float,
    coefficient: float,
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    row: Tensor,
    column: Tensor,
    target: Tensor,
) -> None:
    """Updates one matrix [rows, columns].

    Each matrix is updated by itself, because sums over a stack could round differently for another chunk size.
    """
    share, rate = step**settings.beta2_decay, min(learning_rate, 1 / math.sqrt(step))
    keep = 1 - learning_rate * settings.weight_decay
    kernel = load_kernel() if weight.device.type == "cpu" else None
    if kernel is not None:
        kernel.adafactor(
            weight.shape[0],
            *_arguments(weight, target, remainder, gradient, step),
            weight.shape[1],
            row.data_ptr(),
            column.data_ptr(),
            coefficient,
            share,
            1 - share,
            keep,
            _EPSILON_GRADIENT,
            _EPSILON_GRADIENT**-2,
            rate,
            settings.clipping_threshold,
            _EPSILON_SCALE,
        )
        return
    master = read_master(weight, remainder)
    gradient = gradient.float() * coefficient
    squares = gradient.square()
    # Sums in double: their order then hardly ever changes the fp32 result.
    for average, dim in ((row, -1), (column, -2)):
        average.mul_(1 - share).add_(squares.mean(dim, keepdim=True, dtype=torch.float64).float() * share)
    relative = row / row.mean(dtype=torch.float64).float().clamp(min=_EPSILON_GRADIENT)
    inverse_variance = (relative.reciprocal() * column.reciprocal()).clamp_(max=_EPSILON_GRADIENT**-2).double()
    change = gradient * inverse_variance.sqrt().float()
    rate *= max(_EPSILON_SCALE, math.sqrt(sum_of_squares(master) / master.numel()))
    size = math.sqrt(float((gradient.double().square() * inverse_variance).sum()) / change.numel())
    rate /= max(1.0, size / settings.clipping_threshold)
    write_master(master * keep - change * rate, target, remainder, step)
