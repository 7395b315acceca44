"""The fixed tree of sums: whatever ranks share the leaves, the result is the same to the bit."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from m6.config import sum_tree
from m6.config.sum_tree import TreeShape, most_sums
from m6.training.engine.tree_gradients import BranchSum, Level


def random_leaves(count: int) -> list[Tensor]:
    # So many that every order of summation rounds some of them to another result.
    return list(torch.randn(count, 1000, generator=torch.Generator().manual_seed(0)))


def summed(leaves: list[Tensor], shares: tuple[int, ...], group_size: int = 1, rows_of_node: int = 0) -> Tensor:
    """What the ranks compute together: the branches of each, then the tree over the ranks, or first in each node."""
    shape = TreeShape(shares, group_size)
    assert shape.leaves * group_size == len(leaves)
    received = []
    for group in range(len(shares)):
        first, end = shape.part(group)
        for place in range(group_size):
            own = BranchSum(shape, group)
            for leaf in range(first, end):
                own.add([leaves[leaf * group_size + place].clone()])
            received += [branch for [branch] in own.finish()]
    level = Level.of_all(shape)
    if rows_of_node:
        nodes = [Level.in_node(shape, rows_of_node, node) for node in range(len(shares) // rows_of_node)]
        rows, received = iter(received), []
        for each in nodes:
            of_node = itertools.islice(rows, sum(len(branches) for [(_, branches)] in each.held))
            received += each.add_up(of_node)
        level = Level.of_nodes(shape, rows_of_node)
    total, *others = level.add_up(received)
    return sum(others, start=total)


def reference(leaves: list[Tensor]) -> Tensor:
    """The tree by its definition: halves, or the largest power of two below an odd number."""
    if len(leaves) == 1:
        return leaves[0]
    middle = len(leaves) // 2 if len(leaves) % 2 == 0 else max(2**k for k in range(20) if 2**k < len(leaves))
    return reference(leaves[:middle]) + reference(leaves[middle:])


def random_shares(leaves: int, groups: int, dice: random.Random) -> tuple[int, ...]:
    cuts = [0, *sorted(dice.sample(range(1, leaves), groups - 1)), leaves]
    return tuple(end - begin for begin, end in itertools.pairwise(cuts))


@pytest.mark.parametrize("count", [1, 7, 8, 12, 15, 32, 40])
def test_the_sum_does_not_depend_on_the_shares(count: int):
    leaves, dice = random_leaves(count), random.Random(count)
    expected = reference(leaves)
    exact = torch.stack(leaves).double().sum(0)
    # Sums are up to 20, with 40 roundings of 1e-6 at most.
    assert torch.allclose(expected.double(), exact, rtol=0, atol=1e-5)
    for groups in range(1, min(count, 12) + 1):
        shares = random_shares(count, groups, dice)
        assert torch.equal(summed(leaves, shares), expected), shares


def test_another_order_gives_other_bits():
    """The test above could not fail if every order rounded alike."""
    leaves = random_leaves(8)
    swapped = [leaves[1], leaves[2], leaves[0], *leaves[3:]]
    assert not torch.equal(summed(swapped, (8,)), summed(leaves, (8,)))
    assert not torch.equal(torch.stack(leaves).cumsum(0)[-1], summed(leaves, (8,)))


def test_ranks_that_share_experts():
    """Three ranks of a group compute each micro-step together: the group's size is the same in every layout."""
    leaves = random_leaves(24)
    alone = summed(leaves, (8,), 3)
    for shares in ((2, 2, 2, 2), (4, 4), (3, 4, 1)):
        assert torch.equal(summed(leaves, shares, 3), alone)


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_sum_of_nodes_first_has_the_same_bits(group_size: int):
    """Nodes whose part is a branch, and nodes with several branches."""
    leaves, dice, steps = random_leaves(24), random.Random(0), 24 // group_size
    alone = summed(leaves, (steps,), group_size)
    for groups, rows in ((4, 2), (6, 2), (6, 3), (8, 4)):
        for shares in (random_shares(steps, groups, dice), random_shares(steps, groups, dice)):
            assert torch.equal(summed(leaves, shares, group_size, rows), alone), (shares, rows)
    assert torch.equal(summed(leaves, (steps // 4,) * 4, group_size, 2), alone)


def test_partial_sums_are_few():
    """One for each level of the branch, so that 16 micro-batches keep at most 5 gradients."""
    own = BranchSum(TreeShape((16,)), 0)
    held = []
    for leaf in random_leaves(16):
        own.add([leaf])
        held.append(len(own._partial))
    assert held == [bin(number).count("1") for number in range(1, 17)]
    assert len(own.finish()) == 1
    assert most_sums((16,)) == most_sums((16, 16)) == (max(held[:-1]), 1)
    assert most_sums((3, 4, 1)) == (2, 3)  # leaf 3, leaves 4 and 5, and leaf 6 are branches of three


def test_branches_of_a_rank_are_few():
    """At most two for each level, wherever its part begins and ends; equal parts of a power of two are one branch."""
    for leaves in (7, 24, 100, 128):
        levels = (leaves - 1).bit_length()
        for first in range(leaves):
            for end in range(first + 1, leaves + 1):
                branches = TreeShape((first, end - first, leaves - end)).branches[1]
                assert len(branches) <= 2 * levels
                assert [branches[0][0], branches[-1][1]] == [first, end]
    assert [len(branches) for branches in TreeShape((6,) * 4).branches] == [1] * 4


def test_branches_are_found_once(monkeypatch: pytest.MonkeyPatch):
    """A step adds up hundreds of buckets with the same tree, of thousands of ranks."""
    shape, sums = TreeShape((3, 4, 1), 2), torch.randn(12, 5)
    first = Level.of_all(shape).add_up(sums.clone())
    monkeypatch.delattr(sum_tree, "_inside")
    again = Level.of_all(shape).add_up(sums.clone())
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_a_sum_of_too_few_leaves_is_an_error():
    own = BranchSum(TreeShape((2, 2)), 1)
    own.add([torch.ones(1)])
    with pytest.raises(AssertionError, match="1 leaves are missing"):
        own.finish()
