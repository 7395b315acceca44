"""The order in which parts are exchanged; with real ranks: tests/distributed/exchange_overlap.py."""

import pytest
import torch

from moe.dispatch import StagedForward
from moe.overlap import OverlappingDispatcher, steps
from moe.routing import Routing


def test_two_parts_with_one_hop():
    starts_before_experts = [(0, 0), (1, 0), (0, None), (0, 1), (1, 1)]
    assert list(steps(2, 1)) == [*starts_before_experts, (1, None), (0, 2), (1, 2)]


@pytest.mark.parametrize("num_hops", [1, 2, 3])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_every_part_overlaps_with_the_experts_of_its_neighbours(num_parts: int, num_hops: int):
    order = list(steps(num_parts, num_hops))
    at = {step: number for number, step in enumerate(order)}
    assert len(at) == len(order) == num_parts * (2 * num_hops + 2)  # each stage once, and the concurrent branch
    for part in range(num_parts):
        staged = [at[part, stage] for stage in range(2 * num_hops + 1)]
        assert staged == sorted(staged)
        if part:  # in flight while the experts compute the part before, which goes back during this part's experts
            assert at[part, 0] < at[part - 1, num_hops] < at[part, 1]
            assert at[part - 1, 2 * num_hops - 1] < at[part, num_hops] < at[part - 1, 2 * num_hops]


@pytest.mark.parametrize(("num_tokens", "num_parts"), [(7, 1), (7, 2), (7, 3), (2, 3), (0, 2)])
def test_the_output_is_put_together_in_the_order_of_the_tokens(num_tokens: int, num_parts: int):
    class Identity:
        num_hops, traffic = 1, None

        def staged_forward(self, tokens: torch.Tensor, routing: Routing, experts: None) -> StagedForward:
            assert len(routing.tokens) == len(tokens)
            yield
            yield
            return tokens

    tokens = torch.randn(num_tokens, 4)
    routing = Routing(torch.arange(num_tokens), torch.ones(num_tokens), torch.tensor([num_tokens, 0]))
    output = OverlappingDispatcher(Identity(), num_parts)(tokens, routing, None, concurrent=lambda part: 2 * part)
    assert torch.equal(output, 3 * tokens)


@pytest.mark.parametrize("num_hops", [1, 2, 3])
def test_a_trip_pauses_for_the_outermost_exchange_alone(num_hops: int):
    stages: list[int] = []

    class Counted:
        traffic = None

        def __init__(self) -> None:
            self.num_hops = num_hops

        def staged_forward(self, tokens: torch.Tensor, routing: Routing, experts: None) -> StagedForward:
            for stage in range(2 * num_hops):
                stages.append(stage)
                yield
            return tokens

    tokens, routing = torch.ones(3, 4), Routing(torch.arange(3), torch.ones(3), torch.tensor([3, 0]))
    staged = OverlappingDispatcher(Counted()).staged_forward(tokens, routing, None)
    next(staged)
    assert stages == [0], "on the way to other nodes"
    next(staged)
    assert stages == list(range(2 * num_hops)), "on the way back from them"
    with pytest.raises(StopIteration) as end:
        next(staged)
    assert torch.equal(end.value.value, tokens)
    with pytest.raises(ValueError, match="overlap_parts is 2; expected 1"):
        next(OverlappingDispatcher(Counted(), num_parts=2).staged_forward(tokens, routing, None))
