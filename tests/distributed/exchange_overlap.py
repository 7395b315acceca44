"""What a rank computes while exchanges are under way, and that the parts of a layer change no numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe import MoELayer
from moe.dispatch_dtype import CODECS
from tests.distributed.exchange_layers import HIDDEN, assert_equal, config, make_layer, split

# Forward and backward: what starts and ends are exchanges of rows, numbered in the order of their starts.
ORDERS = {
    (1, 1): "start 0, end 0, experts, start 1, shared, end 1",
    (2, 1): "start 0, start 1, shared, end 0, experts, start 2, end 1, experts, start 3, shared, end 2, end 3",
    (2, 2): "start 0, shared, end 0, start 1, start 2, end 1, experts, start 3, end 2, start 4, end 3, start 5, "
    "end 4, experts, start 6, end 5, end 6, start 7, shared, end 7",
}


@contextmanager
def recorded(layer: MoELayer) -> Iterator[list[str]]:
    """Records starts and ends of exchanges of rows, and the computations of experts and shared experts."""
    events: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            events.append(name)
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
            events.append(ctx.name)
            return grad, None

    class Work:
        def __init__(self, work: dist.Work, number: int) -> None:
            self.work, self.number = work, number

        def wait(self) -> None:
            events.append(f"end {self.number}")
            self.work.wait()

    def watch(name: str) -> Callable[..., dist.Work]:
        collective = getattr(dist, name)

        def started(buffer: Tensor, *arguments: object, **options: object) -> dist.Work:
            work = collective(buffer, *arguments, **options)
            if buffer.dim() < 2 or buffer.shape[1] != HIDDEN:
                return work
            number = sum(event.startswith("start") for event in events)
            events.append(f"start {number}")
            return Work(work, number)

        return started

    def watch_module(module: torch.nn.Module, name: str) -> Callable[..., Tensor]:
        forward = module.forward
        return lambda *arguments: Watched.apply(forward(*arguments), name)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "all_gather_single", "reduce_scatter_single"):
            patch.setattr(dist, name, watch(name))
        for name in ("experts", "shared"):
            module = getattr(layer, name)
            patch.setattr(module, "forward", watch_module(module, name))
        yield events


def check_order(world_size: int) -> None:
    """Every exchange starts before the computation beside it, also of gradients, whose order is the mirrored one."""
    kinds: list[dict[str, object]] = [{}, {"exchange": "all_to_all"}]
    if world_size == 4:
        kinds += [{"ranks_per_node": 2, "exchange": "all_to_all"}, {"ranks_per_node": 2}]
    for kind, parts in product(kinds, (1, 2)):
        hops = 2 if "ranks_per_node" in kind else 1
        if (parts, hops) not in ORDERS:
            continue
        layer = split(make_layer(config(**kind, num_shared_experts=1, overlap_parts=parts)), world_size)
        # One rank has no token, so its parts are empty.
        x = torch.randn(8 if dist.get_rank() else 0, HIDDEN, requires_grad=True)
        with recorded(layer) as events:
            output = layer(x).hidden_states
            assert events == ORDERS[parts, hops].split(", "), f"{kind}, {parts}, {events}"
            events.clear()
            output.sum().backward()
            expected = mirrored(ORDERS[parts, hops].split(", "))
            assert events == expected, f"{kind}, {parts} parts, backward: {events}, {expected}"


def mirrored(events: list[str]) -> list[str]:
    """The order of the backward pass: the last comes first, and what ended starts."""
    names = {"start": "end", "end": "start"}
    numbers: dict[str, int] = {}
    result = []
    for event in reversed(events):
        name, _, number = event.partition(" ")
        if not number:
            result.append(name)
            continue
        result.append(f"{names[name]} {numbers.setdefault(number, len(numbers))}")
    return result


def check_parts(world_size: int) -> None:
    """Exchanged in parts or not: the same outputs and gradients, with padding, capacities, rounding, recomputation."""
    view_prototypes = {"exchange": "prototype"}
    kinds: list[dict[str, object]] = [view_prototypes, {"exchange": "all_to_all"}, {"num_prototypes": 1, "top_k": 2}]
    if world_size == 4:
        kinds += [{"num_prototypes": 1, "top_k": 2, "ranks_per_node": 2}]
        kinds += [view_prototypes | {"num_prototypes": 2}, view_prototypes | {"ranks_per_node": 2}]
    settings = {"capacity_factor": 0.8, "min_capacity": 1, "num_shared_experts": 1, "aux_loss_weight": 0.1}
    for kind, dispatch_dtype in product(kinds, CODECS):
        layer = split(make_layer(config(**(settings | kind), dispatch_dtype=dispatch_dtype)), world_size)
        for parts, rows in ((2, [3, 1, 0, 5]), (3, [0, 2, 1, 1])):
            layer.dispatcher.num_parts = 1
            once = run(layer, rows[dist.get_rank()])
            layer.dispatcher.num_parts = parts
            divided = run(layer, rows[dist.get_rank()], recompute=parts == 3)
            for name, expected in once.items():
                found, where = divided[name], f"{kind} {dispatch_dtype}, {parts} parts, {name}"
                if dispatch_dtype == "same":
                    assert_equal(found, expected, where)
                elif expected.numel():
                    # A sum in another order may be rounded to the next number: 2^-8 of it, or 2^-4 in float8.
                    error, scale = (found - expected).abs(), expected.abs().max().item()
                    assert error.median() <= 1e-6 * scale, f"{where}: {error.median()}"
                    assert error.max() <= scale / (128 if dispatch_dtype == "bfloat16" else 16), (
                        f"{where}: {error.max()}"
                    )


def run(layer: MoELayer, rows: int, recompute: bool = False) -> dict[str, Tensor]:
    """The output of a call with padding, and all gradients."""
    layer.zero_grad()
    torch.manual_seed(dist.get_rank())
    x, mask = torch.randn(rows, 7, HIDDEN), torch.rand(rows, 7) < 0.8
    weight = torch.randn(rows, 7, HIDDEN)
    x.requires_grad_()
    if recompute:
        output, aux_loss, *_ = checkpoint(layer, x, mask, use_reentrant=False)
    else:
        output, aux_loss, *_ = layer(x, mask)
    ((output * weight).sum() + aux_loss).backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {"output": output.detach(), "aux_loss": aux_loss.detach(), "x": x.grad, **grads}
