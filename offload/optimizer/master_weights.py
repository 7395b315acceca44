"""fp32 master weights, stored as the weight and a remainder."""

from __future__ import annotations

import torch
from torch import Tensor


def remainder_dtype(dtype: torch.dtype, split_master: bool = True) -> torch.dtype | None:
    """Returns the type of the remainder that is stored with a weight of type ``dtype``; None if there is none.

    A bfloat16 number is the upper half of an fp32 number, so the lower 16 bits suffice as the remainder: 4 bytes for
    each parameter instead of 6 ("split master"). The weight is the upper half rounded half up. The lower half alone
    then shows whether the upper half was rounded up. This rounding differs from PyTorch's at exact ties only.

    Args:
        split_master: False: the remainder is a whole fp32 master. The weight is rounded in the same way.
    """
    if not split_master and dtype != torch.float32:
        return torch.float32
    return {torch.float32: None, torch.bfloat16: torch.int16, torch.float16: torch.float32}[dtype]


def read_master(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """Returns the fp32 values; for an fp32 weight that is the weight itself, not a copy."""
    if weight.dtype == torch.float32:
        return weight
    assert remainder is not None
    if remainder.dtype == torch.float32:
        return remainder
    lower = remainder.to(torch.int32) & 0xFFFF
    upper = weight.view(torch.int16).to(torch.int32) - (lower >> 15)
    return (upper << 16 | lower).view(torch.float32)


def write_master(value: Tensor, weight: Tensor, remainder: Tensor | None) -> None:
    """Stores fp32 values as a weight and its remainder."""
    if weight.dtype == torch.float32:
        weight.copy_(value)
        return
    assert remainder is not None
    if weight.dtype == torch.float16:
        remainder.copy_(value)
        weight.copy_(value)
        return
    bits = value.view(torch.int32)
    # The sum may overflow int32 for the largest values. It wraps around, and the upper 16 bits are still right.
    weight.view(torch.int16).copy_(((bits + 0x8000) >> 16).to(torch.int16))
    remainder.copy_(value if remainder.dtype == torch.float32 else bits.to(torch.int16))
