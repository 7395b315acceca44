"""What travels is off by what its format rounds, and no more."""

import pytest
import torch

from moe.dispatch_dtype import CODECS, BFloat16, Float8, Identity


def rows() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(64, 24) * torch.logspace(-12, 12, 64)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("codec", "rounding"), [(Identity(), 0.0), (BFloat16(), 2**-8), (Float8(), 2**-4)])
def test_rounding(codec, rounding: float, dtype: torch.dtype) -> None:
    exact = (rows() if dtype != torch.float16 else rows().clamp(-1e4, 1e4)).to(dtype)
    found = codec.decode(codec.encode(exact), dtype)
    assert found.dtype == dtype
    largest = exact.double().abs().amax(1, keepdim=True)
    # 1 % more, since the scale and the result are rounded as well; float16 has numbers below its normal ones.
    bound = 1.01 * torch.maximum(rounding * exact.double().abs(), 2**-18 * largest) + (
        1e-7 if dtype == torch.float16 else 0
    )
    assert ((found.double() - exact.double()).abs() <= bound).all()


def test_sizes_and_rows() -> None:
    x = rows()
    sizes = {"same": (96, 96), "bfloat16": (48, 48), "float8": (28, 48), "float8_both": (28, 28)}
    assert sizes.keys() == CODECS.keys()
    for dispatch_dtype, row_bytes in sizes.items():
        for codec, expected in zip(CODECS[dispatch_dtype], row_bytes, strict=True):
            for part in (x, x[:0]):
                encoded = codec.encode(part)
                assert len(encoded) == len(part)
                assert encoded.numel() * encoded.element_size() == expected * len(part)
                assert codec.decode(encoded, x.dtype).shape == part.shape


@pytest.mark.parametrize("codec", [BFloat16(), Float8()])
def test_zeros_and_values_that_are_not_finite_are_kept(codec) -> None:
    x = torch.zeros(3, 8)
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    found = codec.decode(codec.encode(x), x.dtype)
    assert found[0].tolist() == [0.0] * 8
    assert not found[1].isfinite().all()
    assert not found[2].isfinite().all()
