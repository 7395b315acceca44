"""Split masters: every fp32 value, and how far the weights differ from PyTorch's rounding."""

import torch

from offload.optimizer.master_weights import read_master, remainder_dtype, write_master


def test_split_master_holds_every_finite_value():
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), dtype=torch.int64).to(torch.int32)
    edges = [0, 0x8000, 0x7FFF, 0x18000, 0x17FFF, 0x7F7FFFFF, 0x00000001, 0x80000000 - 2**32, 0xFF7FFFFF - 2**32]
    values = torch.cat([bits, torch.tensor(edges, dtype=torch.int32)]).view(torch.float32)
    values = values[values.isfinite()]
    weight, remainder = torch.empty(values.shape, dtype=torch.bfloat16), torch.empty(values.shape, dtype=torch.int16)
    write_master(values, weight, remainder)
    assert torch.equal(read_master(weight, remainder).view(torch.int32), values.view(torch.int32))
    differs = weight.view(torch.int16) != values.bfloat16().view(torch.int16)
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert not (differs & ~ties).any(), "the rounding differs from PyTorch's at exact ties only"


def test_types_of_remainders():
    """bfloat16 needs its lower half alone, unless the master is stored whole; float16 is no half of an fp32 number."""
    for dtype, split, whole in [
        (torch.float32, None, None),
        (torch.bfloat16, torch.int16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
    ]:
        assert remainder_dtype(dtype) == remainder_dtype(dtype, split_master=True) == split
        assert remainder_dtype(dtype, split_master=False) == whole
