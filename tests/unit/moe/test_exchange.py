"""The exchanges in one process, whose collectives give back what a rank sends.

All ranks are then the same one, so the layer with all experts has those of this rank again and again. With real ranks:
tests/distributed/test_exchange.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe import MoEConfig
from moe.collectives import Traffic
from moe.dispatch import Exchange, LocalDispatcher, combine
from moe.exchange import AllToAllExchange, HierarchicalExchange, PrototypeExchange
from moe.experts import Experts
from moe.overlap import OverlappingDispatcher
from moe.routing import Routing, route

RANKS, PROTOTYPES = 4, 8


class Pending:
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def wait(self) -> Tensor:
        return self.rows


class Loopback:
    """``moe.collectives.Collectives`` among ranks that are all this one."""

    def __init__(self, size: int = RANKS) -> None:
        self.size = size
        self.traffic = Traffic()

    def exchange(self, values: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Pending:
        return Pending(values.detach().clone())

    def exchange_exactly(self, rows: Tensor, sent: list[int], received: list[int]) -> Pending:
        return Pending(rows)

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int], *, to_experts: bool) -> Pending:
        assert sum(sent) == sum(received) == len(rows)
        return Pending(rows)

    def all_gather(self, rows: Tensor) -> Pending:
        return Pending(rows.repeat(self.size, 1))

    def reduce_scatter(self, rows: Tensor) -> Pending:
        return Pending(rows.unflatten(0, (self.size, -1)).sum(0))


EXCHANGES: dict[str, Callable[[Loopback], Exchange]] = {
    "all_to_all": AllToAllExchange,
    "prototype": lambda ranks: PrototypeExchange(ranks, LocalDispatcher(), PROTOTYPES // RANKS),
    "equal": lambda ranks: PrototypeExchange(ranks, LocalDispatcher(), PROTOTYPES, equal_tokens=True),
    "node": lambda ranks: HierarchicalExchange(ranks, LocalDispatcher()),
}


def make_case(dtype: torch.dtype, num_tokens: int, capacity_factor: float | None) -> tuple[Experts, Tensor, Routing]:
    """The experts of one rank, tokens, and a routing over the experts of all ranks."""
    torch.manual_seed(0)
    config = MoEConfig(num_experts=32, num_prototypes=PROTOTYPES, capacity_factor=capacity_factor, min_capacity=1)
    experts = Experts(16, 24, config, dtype=dtype)
    experts.keep_local(0, 32 // RANKS, "ranks")
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    wide = torch.promote_types(dtype, torch.float32)
    routing, *_ = route(torch.randn(num_tokens, PROTOTYPES, 4, dtype=wide), config, True)
    return experts, torch.randn(num_tokens, 16, dtype=dtype), routing


def reference(experts: Experts, tokens: Tensor, routing: Routing) -> Tensor:
    """Pair by pair."""
    output = torch.zeros_like(tokens)
    of_pair = torch.arange(32).repeat_interleave(routing.counts)
    for token, gate, expert in zip(routing.tokens, routing.gates, of_pair.tolist(), strict=True):
        own = expert % (32 // RANKS)
        hidden = torch.nn.functional.gelu(experts.w_in[own] @ tokens[token])
        output = output.index_add(0, token[None], (gate * (experts.w_out[own] @ hidden))[None])
    return output


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize(("num_tokens", "capacity_factor"), [(9, None), (1, None), (9, 0.6), (0, None)])
def test_equal_to_the_reference(name: str, num_tokens: int, capacity_factor: float | None, num_parts: int) -> None:
    """In float64, forward and gradients; 1e-12: sums of about 100 numbers near 1 in another order."""
    experts, tokens, routing = make_case(torch.float64, num_tokens, capacity_factor)
    dispatcher = OverlappingDispatcher(EXCHANGES[name](Loopback()), num_parts)
    if name == "equal" and capacity_factor:
        with pytest.raises(
            ValueError, match=r"equal_tokens was promised, but \d tokens have \d+ pairs; expected 8 each"
        ):
            dispatcher(tokens, routing, experts)
        return
    gates = routing.gates.detach().requires_grad_()
    inputs = [tokens.requires_grad_(), gates, *experts.parameters()]
    results = []
    for output in (
        dispatcher(tokens, routing._replace(gates=gates), experts, torch.tanh),
        reference(experts, tokens, routing._replace(gates=gates)) + tokens.tanh(),
    ):
        loss = output.sin().sum() + sum(0 * each.sum() for each in inputs)
        results.append([output, *torch.autograd.grad(loss, inputs)])
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["all_to_all", "node"])
def test_sums_over_many_ranks_round_once(name: str) -> None:
    """256 times 1.25, each of another rank: a sum in bfloat16 stops growing by more than 1 at 128."""
    torch.manual_seed(0)
    experts = Experts(16, 24, MoEConfig(num_experts=1, activation="relu"), dtype=torch.bfloat16)
    with torch.no_grad():
        experts.w_in.fill_(1 / 16)
        experts.w_out.fill_(1 / 24)
    tokens = torch.ones(3, 16, dtype=torch.bfloat16)
    one = experts(tokens[:1], torch.tensor([1]))[0].double()
    counts = torch.full((256,), 3)
    routing = Routing(torch.arange(3).repeat(256), torch.full((768,), 1.25), counts)
    output = OverlappingDispatcher(EXCHANGES[name](Loopback(256)))(tokens, routing, experts)
    # The weighted row and the sum are rounded, each by up to 2^-8 of the value.
    torch.testing.assert_close(output.double(), (256 * 1.25 * one).expand(3, -1), rtol=2 * 2**-8, atol=0)


def test_the_error_of_combine_does_not_grow() -> None:
    """One rounding of bfloat16, 2^-8, and the sum's in float32. 512 numbers added in bfloat16 are off by more."""
    torch.manual_seed(0)
    rows, gates = torch.rand(1024, 8).add(0.5).bfloat16(), torch.rand(1024).add(0.5)
    tokens = torch.arange(2).repeat(512)
    output = combine(rows, Routing(tokens, gates, torch.tensor([1024])), torch.empty(2, 8, dtype=torch.bfloat16))
    expected = (rows.double() * gates.double()[:, None]).view(512, 2, 8).sum(0)
    assert output.dtype == torch.bfloat16
    assert ((output.double() - expected).abs() <= 1.01 * 2**-8 * expected).all()
