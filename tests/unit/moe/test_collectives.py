"""In which number format what travels, in a group of one rank, where the rounding is all that happens."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.collectives import Collectives, Traffic
from moe.config import DispatchDtype
from moe.dispatch_dtype import BFloat16, Codec, Float8, Identity


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    if dist.is_initialized():  # by a module that was tested before in this process
        yield dist.group.WORLD
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def rounded(codec: Codec, rows: Tensor) -> Tensor:
    return codec.decode(codec.encode(rows), rows.dtype)


def passes(collectives: Collectives, kind: str, rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What comes out of an exchange, and the gradient that goes back through it."""
    rows = rows.clone().requires_grad_()
    sizes = [len(rows)]
    output = {
        "to experts": lambda: collectives.all_to_all(rows, sizes, sizes, to_experts=True).wait(),
        "from experts": lambda: collectives.all_to_all(rows, sizes, sizes, to_experts=False).wait(),
        "all-gather": lambda: collectives.all_gather(rows).wait(),
        "reduce-scatter": lambda: collectives.reduce_scatter(rows).wait(),
        "exactly": lambda: collectives.exchange_exactly(rows, sizes, sizes).wait(),
    }[kind]()
    return output.detach(), torch.autograd.grad(output, rows, grad)[0]


@pytest.mark.parametrize(
    ("dispatch_dtype", "to_experts", "from_experts"),
    [
        ("same", Identity(), Identity()),
        ("bfloat16", BFloat16(), BFloat16()),
        ("float8", Float8(), BFloat16()),
        ("float8_both", Float8(), Float8()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_formats_of_rows_and_gradients(
    group: dist.ProcessGroup, dispatch_dtype: DispatchDtype, to_experts: Codec, from_experts: Codec, dtype: torch.dtype
) -> None:
    """A gradient goes the other way, so it has the other way's format."""
    torch.manual_seed(0)
    collectives = Collectives(group, dispatch_dtype)
    rows, grad = torch.randn(2, 5, 16).to(dtype)
    for kind in ("to experts", "all-gather", "from experts", "reduce-scatter"):
        there, back = (to_experts, from_experts) if kind in ("to experts", "all-gather") else (from_experts, to_experts)
        output, own_grad = passes(collectives, kind, rows, grad)
        assert torch.equal(output, rounded(there, rows)), kind
        assert torch.equal(own_grad, rounded(back, grad)), kind
    assert all(
        torch.equal(*pair) for pair in zip(passes(collectives, "exactly", rows, grad), (rows, grad), strict=True)
    )
    if dtype == torch.float16:  # bfloat16 would have fewer digits in as many bytes
        assert torch.equal(rounded(BFloat16(), rows), rows)
    assert collectives.traffic == Traffic(), "nothing went to another rank"
