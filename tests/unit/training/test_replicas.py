"""The hash of a tensor's bits."""

import pytest
import torch

from m6.training.replicas import hash_of

MASK = 2**64 - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


def reference(tensor: torch.Tensor) -> int:
    """The same in Python's integers, element by element."""
    size = tensor.element_size()
    data = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    signed = size > 1
    bits = [int.from_bytes(bytes(data[i : i + size]), "little", signed=signed) for i in range(0, len(data), size)]
    whole = len(bits) // 4096
    sums = [sum(bits[4096 * row : 4096 * (row + 1)]) for row in range(whole)] + [sum(bits[4096 * whole :])]
    total = 0
    for index, value in enumerate(sums):
        value = ((value + 2**63) & MASK) - 2**63  # as int64
        total += (value ^ (value >> 29)) * 0x9E3779B97F4A7C1 * (2 * index + 1)
    return total & (2**62 - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (4096,), (3, 4097)])
def test_it_is_that_of_exact_arithmetic(dtype: torch.dtype, shape: tuple[int, ...]):
    torch.manual_seed(0)
    tensor = (100 * torch.randn(shape, dtype=torch.float64)).abs().to(dtype)
    assert hash_of(tensor).item() == reference(tensor)


def test_any_other_bit_is_another_hash():
    torch.manual_seed(1)
    tensor = torch.randn(5, 4096)
    others = [tensor[[1, 0, 2, 3, 4]], tensor * 1.01, torch.full_like(tensor, float("nan")), tensor[:4]]
    for element in torch.randint(tensor.numel(), (100,)).tolist():
        others.append(tensor.clone())
        others[-1].view(torch.int32).view(-1)[element] ^= 1
    assert hash_of(tensor) not in [hash_of(other) for other in others]
    assert hash_of(tensor.T.contiguous().T) == hash_of(tensor), "of the values, however they lie in memory"
