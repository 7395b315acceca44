"""The fixed tree of sums: whatever ranks share the leaves, the result is the same to the bit."""

import pytest
import torch
from torch import Tensor

from m6.training.engine.tree_sum import BranchSum, TreeShape, _tree, buckets


def random_leaves(count: int) -> list[Tensor]:
    # So many that every order of summation rounds some of them to another result.
    return list(torch.randn(count, 1000, generator=torch.Generator().manual_seed(0)))


def summed(leaves: list[Tensor], groups: int, group_size: int = 1) -> Tensor:
    """What the ranks compute together: the branch of each, then the tree over the ranks."""
    shape = TreeShape(len(leaves) // group_size, groups, group_size)
    branches = []
    for group in range(groups):
        for place in range(group_size):
            branch = BranchSum(shape.run)
            for index in range(shape.leaves // groups):
                branch.add([leaves[(group * shape.leaves // groups + index) * group_size + place].clone()])
            branches.append(branch.finish()[0])
    return _tree(torch.stack(branches).view(groups, group_size, -1))


@pytest.mark.parametrize(("count", "groups"), [(8, (2, 4, 8)), (12, (2, 4)), (16, (4, 16)), (7, (1,)), (40, (2, 8))])
def test_the_sum_does_not_depend_on_the_number_of_ranks(count: int, groups: tuple[int, ...]):
    leaves = random_leaves(count)
    alone = summed(leaves, 1)
    exact = torch.stack(leaves).double().sum(0)
    # Sums are up to 20, with 40 roundings of 1e-6 at most.
    assert torch.allclose(alone.double(), exact, rtol=0, atol=1e-5)
    for number in groups:
        assert torch.equal(summed(leaves, number), alone)


def test_another_order_gives_other_bits():
    """The test above could not fail if every order rounded alike."""
    leaves = random_leaves(8)
    swapped = [leaves[1], leaves[2], leaves[0], *leaves[3:]]
    assert not torch.equal(summed(swapped, 1), summed(leaves, 1))
    assert not torch.equal(torch.stack(leaves).cumsum(0)[-1], summed(leaves, 1))


def test_ranks_that_share_experts():
    """Three ranks of a group compute each micro-step together: the group's size is the same in every layout."""
    leaves = random_leaves(24)
    assert torch.equal(summed(leaves, 4, 3), summed(leaves, 2, 3))
    assert torch.equal(summed(leaves, 4, 3), summed(leaves, 1, 3))


def test_partial_sums_are_few():
    """One for each level of the branch, so that 16 micro-batches keep at most 5 gradients."""
    branch = BranchSum(1)
    held = []
    for leaf in random_leaves(16):
        branch.add([leaf])
        held.append(len(branch._partial))
    assert held == [bin(number).count("1") for number in range(1, 17)]
    assert len(branch.finish()) == 1
    branch.add([torch.ones(3)])  # a next step begins anew
    assert torch.equal(branch.finish()[0], torch.ones(3))


def test_the_tree_of_a_number_of_micro_steps():
    assert [TreeShape(leaves, 1, 1).run for leaves in (1, 6, 8, 12, 7)] == [1, 3, 1, 3, 7]


def test_buckets_hold_all_tensors_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("m6.training.engine.tree_sum.BUCKET_ELEMENTS", 10)
    tensors = [torch.zeros(size) for size in (4, 6, 1, 30, 2, 9)]
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets(tensors)] == [[4, 6], [1], [30], [2], [9]]
