"""What a rank computes while an exchange is under way."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import MoELayer
from tests.distributed.exchange_layers import HIDDEN, assert_equal, config, make_layer, split


def check_overlap(world_size: int) -> None:
    """The computation runs between start and end of the exchange, its backward pass between those of the gradients'."""
    events: list[str] = []
    layer = split(make_layer(config()), world_size)
    a2a = split(make_layer(config(exchange="all_to_all")), world_size)
    torch.manual_seed(0)
    dense = nn.Linear(HIDDEN, HIDDEN)

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            events.append("dense")
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            events.append("dense backward")
            return grad

    class Work:
        def __init__(self, work: dist.Work, name: str) -> None:
            self.work, self.name = work, name

        def wait(self) -> None:
            events.append(f"end {self.name}")
            self.work.wait()

    def watch(name: str) -> Callable[..., Work]:
        collective = getattr(dist, name)

        def started(buffer: Tensor, *arguments: object, **options: object) -> Work:
            label = f"{name} of rows" if buffer.dim() == 2 and buffer.shape[1] == HIDDEN else "other"
            events.append(f"start {label}")
            return Work(collective(buffer, *arguments, **options), label)

        return started

    names = ("all_to_all_single", "all_gather_single", "reduce_scatter_single")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, watch(name))
        for each, there, back in (
            (layer, "all_gather_single", "reduce_scatter_single"),
            (a2a, "all_to_all_single", "all_to_all_single"),
        ):
            x = torch.randn(8, HIDDEN, requires_grad=True)
            routing, _, _ = route_of(each, x)
            events.clear()
            output = each.dispatcher(x, routing, each.experts, overlap=lambda x=x: dense(Watched.apply(x)))
            assert in_order(events, f"start {there} of rows", "dense", f"end {there} of rows")
            events.clear()
            output.sum().backward()
            last_start = len(events) - 1 - events[::-1].index(f"start {back} of rows")
            assert events[last_start:].index("dense backward") < events[last_start:].index(f"end {back} of rows")
    with torch.no_grad():
        whole = make_layer(config())
        assert_equal(output, whole(x).hidden_states + dense(x))


def route_of(layer: MoELayer, x: Tensor) -> tuple:
    from moe.routing import route

    return route(layer.router(x), layer.config, True)


def in_order(events: list[str], *expected: str) -> bool:
    remaining = iter(events)
    return all(event in remaining for event in expected)
