"""Split masters, and weights without masters that are rounded at random."""

import pytest
import torch

import offload.optimizer.master_weights
from offload.optimizer.master_weights import read_master, remainder_dtype, write_master

HALVES = (torch.bfloat16, torch.float16)


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
    """bfloat16 needs its lower half alone; float16 is no half of an fp32 number."""
    assert [remainder_dtype(dtype) for dtype in (torch.float32, *HALVES)] == [None, torch.int16, torch.float32]
    assert all(remainder_dtype(dtype, masters=False) is None for dtype in (torch.float32, *HALVES))


@pytest.fixture(params=[True, False], ids=["kernel", "PyTorch"])
def kernel(request, monkeypatch):
    """Whether the compiled kernel rounds."""
    if not request.param:
        monkeypatch.setattr(offload.optimizer.master_weights, "load_kernel", lambda: None)
    return request.param


def rounded(values, dtype, step):
    weight = torch.empty(values.shape, dtype=dtype)
    write_master(values, weight, None, step)
    return weight


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [1.0, 3e-3, 1e-5, 1e-7])  # float16's normal numbers begin at 6.1e-5
def test_random_rounding_takes_a_neighbour_and_keeps_the_mean(dtype, size):
    """The mean of 4,000 roundings is within 5 standard errors of each of 1,000 values."""
    values = torch.randn(1_000, generator=torch.Generator().manual_seed(1)) * size
    nearest = values.to(dtype)
    # 16-bit numbers of one sign are ordered as their bits, so the next number of larger size has the next bits.
    towards_zero = nearest.view(torch.int16) - (nearest.float().abs() > values.abs()).to(torch.int16)
    inner, outer = (bits.view(dtype).float() for bits in (towards_zero, towards_zero + 1))
    draws = torch.stack([rounded(values, dtype, step).float() for step in range(1, 4001)])
    assert ((draws == inner) | (draws == outer)).all()
    error, step = (draws.mean(0) - values).abs(), (outer - inner).abs()
    # The least share of a step that the added noise can tell is 2^-13.
    assert (error <= (5 * 0.5 / 4000**0.5 + 2.0**-13) * step).all()
    assert (draws != draws[0]).any(0).float().mean() > 0.9


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_16_bits_can_hold_is_not_changed(dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    for step in (1, 2, 1000):
        assert torch.equal(rounded(values.float(), dtype, step).view(torch.int16), values.view(torch.int16))
    strange = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(rounded(strange, dtype, 5).float().nan_to_num(nan=7.0), strange.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_kernel_and_pytorch_round_alike(dtype, monkeypatch):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(2)) * torch.logspace(-9, 4, 100_000)
    compiled = [rounded(values, dtype, step).view(torch.int16) for step in (1, 2**31)]
    monkeypatch.setattr(offload.optimizer.master_weights, "load_kernel", lambda: None)
    for step, expected in zip((1, 2**31), compiled, strict=True):
        assert torch.equal(rounded(values, dtype, step).view(torch.int16), expected)


def test_neighbouring_numbers_of_steps_and_values_round_independently():
    """The correlations of 20,000 pairs of roundings are below 5 standard errors."""
    values = 1 + torch.linspace(0.25, 0.75, 20_000) * 2.0**-7
    draws = torch.stack([rounded(values, torch.bfloat16, step).float() - values for step in (7, 8)])
    later = torch.stack([draws[0][:-1], draws[0][1:]])
    for pair in (draws, later):
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / 20_000**0.5
