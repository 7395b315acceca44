"""The virtual clock against cases by hand. Halves are exact in binary, so results are compared for equality."""

import itertools

import pytest

from moe.overlap_simulator import Operation, Span, interleaved_operations, interleaved_span, operations, span


def test_nothing_is_hidden_without_parts():
    assert span([3.0], 4.0, [2.0]) == Span(total=9.0, compute=4.0, network=5.0)
    assert span([3.0], 4.0, [2.0]).exposed == 5.0
    assert span([3.0], 4.0, [2.0]).hidden == 0.0


def test_two_halves_hide_one_exchange_each_way():
    # there 0-1, 1-2; experts 1-5, 5-9; back 5-6, 9-10
    found = span([1.0], 4.0, [1.0], num_parts=2)
    assert found == Span(10.0, 8.0, 4.0)
    assert (found.exposed, found.hidden) == (2.0, 2.0)


def test_a_slow_network_hides_the_experts_instead():
    # there 0-3, 3-6; experts 3-4, 6-7; back 6-9 (after the second way there), 9-12
    assert span([3.0], 1.0, [3.0], num_parts=2).total == 12.0
    assert span([3.0], 1.0, [3.0], num_parts=2).exposed == 10.0


def test_four_parts_expose_a_quarter():
    found = span([0.5], 2.0, [0.5], num_parts=4)
    assert found.exposed == 1.0
    assert found.hidden == 3.0


def test_shared_experts_hide_the_first_and_the_last_exchange():
    # concurrent 0-1 with there 0-1, 1-2; experts 1-5, 5-9; back 5-6, 9-10 with concurrent 9-10
    assert span([1.0], 4.0, [1.0], num_parts=2, concurrent=1.0).exposed == 0.0
    assert span([2.0], 4.0, [1.0], concurrent=0.5).exposed == 2.5


def test_between_nodes_first():
    # Part 0: there 0-2 and 2-3, experts 3-7. Part 1: there 3-5 during them and 7-8.
    # Part 0 back: 8-9 inside, 9-11 between; the experts of part 1: 9-13; back: 13-14, 14-16.
    found = span([2.0, 1.0], 4.0, [1.0, 2.0], num_parts=2)
    assert found == Span(16.0, 8.0, 12.0)
    assert found.hidden == 4.0  # both ways between nodes, of one part each


@pytest.mark.parametrize(("num_parts", "num_hops"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 3)])
def test_the_backward_pass_is_mirrored(num_parts: int, num_hops: int):
    """What was waited for starts, and nothing is waited for before it has started."""
    forward = list(operations(num_parts, num_hops))
    backward = list(operations(num_parts, num_hops, backward=True))
    for order in (forward, backward):
        position = {operation: number for number, operation in enumerate(order)}
        assert len(position) == len(order) == num_parts * (4 * num_hops + 2)
        for kind, part, hop in order:
            if kind == "wait":
                assert position[("start", part, hop)] < position[("wait", part, hop)]
    computations = [[each for each in order if each.kind in ("experts", "concurrent")] for order in (forward, backward)]
    assert computations[0] == computations[1][::-1]


def test_the_backward_pass_of_two_halves():
    # Gradients: back 0-1, 1-2; experts of the second half 1-9, of the first 9-17; there 9-11, 17-19
    assert span([2.0], 8.0, [1.0], num_parts=2, backward=True) == Span(19.0, 16.0, 6.0)


# Two passes through two layers, with one hop: "B" is computed while the tokens of "A" are on their way.
TURNS = """
deferred A, concurrent A, start A, deferred B, concurrent B, start B,
wait A, experts A, start A, deferred A, wait B, experts B, start B, deferred B,
wait A, concurrent A, start A, wait B, concurrent B, start B,
wait A, experts A, start A, wait B, experts B, start B,
wait A, wait B
"""


def named(order: list[Operation]) -> list[str]:
    return [f"{each.kind} {'AB'[each.part]}" for each in order]


def test_passes_take_turns():
    expected = TURNS.replace("\n", " ").strip().split(", ")
    assert named(list(interleaved_operations(2, 2, 1))) == expected
    mirror = {"start": "wait", "wait": "start"}
    backward = [" ".join((mirror.get(kind, kind), whose)) for kind, whose in map(str.split, reversed(expected))]
    assert named(list(interleaved_operations(2, 2, 1, backward=True))) == backward


def test_inner_hops_do_not_interrupt_a_pass():
    order = [f"{each.kind} {each.hop}" for each in interleaved_operations(1, 2, 2) if each.kind in ("start", "wait")]
    assert order == [f"{kind} {hop}" for hop in range(8) for kind in ("start", "wait")]
    switches = sum(a.part != b.part for a, b in itertools.pairwise(interleaved_operations(2, 2, 2)))
    assert switches == 2 * 5 - 1, "at the outer exchanges of two layers, there and back, and at the end"


def test_turns_on_a_slow_and_on_a_fast_network():
    # A: concurrent 0-1, there 1-3. B: concurrent 1-2, there 3-5. A: experts 3-4, back 5-7. B: experts 5-6, back 7-9.
    assert interleaved_span([2.0], 1.0, [2.0], 2, 1, 1.0) == Span(9.0, 4.0, 8.0)
    # All of A's exchanges overlap with B: what is exposed is the way of B back.
    assert interleaved_span([0.5], 1.0, [0.5], 2, 1, 1.0) == Span(4.5, 4.0, 2.0)
    assert interleaved_span([0.5], 1.0, [0.5], 2, 10, 1.0).exposed == 0.5
    one_by_one = interleaved_span([0.5], 1.0, [0.5], 1, 10, 1.0)
    assert one_by_one == Span(30.0, 20.0, 10.0)


def test_deferred_gradients_are_computed_while_others_are_on_their_way():
    # Of layer 1. B: back 0-2, experts 2-3, there 4-6. A: back 2-4, experts 4-5, there 6-8. B: concurrent but for the
    # deferred 6-8, back of layer 0 8-10. A: concurrent 8-10, back 10-12. B: deferred 10-11, experts 11-12, there
    # 12-14. A: deferred 12-13, experts 13-14, there 14-16. Of layer 0. B: concurrent 14-16, deferred 16-17. A:
    # concurrent 17-19, deferred 19-20.
    layers = ([2.0], 1.0, [2.0], 2, 2, 3.0)
    assert interleaved_span(*layers, backward=True, deferred=1.0) == Span(20.0, 16.0, 16.0)
    # At once, A's concurrent branch takes from 9 to 12, and B's experts, whose gradients are there at 11, begin at 12.
    assert interleaved_span(*layers, backward=True) == Span(22.0, 16.0, 16.0)


def test_hops_inside_of_a_node_do_not_wait_for_the_network():
    # A: concurrent 0-1, between nodes 1-5. B: concurrent 1-2, between nodes 5-9. A: inside 5-6, experts 6-7, back
    # inside 7-8, between nodes 9-13. B: inside 9-10, experts 10-11, back 11-12 and 13-17.
    hops = ([4.0, 1.0], 1.0, [1.0, 4.0], 2, 1, 1.0)
    assert interleaved_span(*hops, links=[1, 0]) == Span(17.0, 4.0, 20.0)
    # On one link A: inside 9-10, experts 10-11, back 11-12 and 12-16. B: inside 16-17, experts 17-18, back 18-23.
    assert interleaved_span(*hops).total == 23.0
    assert span([2.0, 1.0], 4.0, [1.0, 2.0], 2, links=[1, 0]).total == span([2.0, 1.0], 4.0, [1.0, 2.0], 2).total
