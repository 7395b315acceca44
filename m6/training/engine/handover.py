"""Takes local gradients from DeepSpeed, and returns sums to it; written for DeepSpeed 0.19.8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def take_gradient(parameter: nn.Parameter) -> Tensor:
    """Moves the gradient of a parameter out of the model, in fp32; zeros if the model did not use the parameter."""
    # At stage 1 DeepSpeed may have moved a 16-bit gradient to an fp32 one.
    gradient = getattr(parameter, "grad_accum", None)
    gradient = parameter.grad if gradient is None else gradient
    parameter.grad = None
    if hasattr(parameter, "grad_accum"):
        parameter.grad_accum = None
    return torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient.float()


def give_partition(zero: Any, gradients: dict[nn.Parameter, Tensor]) -> list[Tensor]:
    """Stores this rank's partition of whole gradients in DeepSpeed's stage-1 optimizer, and returns the partition."""
    for index, parameters in enumerate(zero.params_in_partition):
        dtype = zero.gradient_accumulation_dtype
        zero.all_grad_tensors[index] = [gradients[parameter].to(dtype) for parameter in parameters]
        zero.averaged_gradients[index] = zero.get_flat_partition(
            parameters,
            zero.first_offset[index],
            zero.partition_size[index],
            dtype=dtype,
            device=zero.single_partition_of_fp32_groups[index].device,
            param_group_idx=index,
            return_tensor_list=True,
        )
        zero.all_grad_tensors[index] = None
    return [gradient for group in zero.averaged_gradients.values() for gradient in group]
