"""The tree in whose order ``"deterministic": "any_world"`` adds up the gradients of a step.

The leaves are the micro-steps of a global batch: a micro-step is one micro-batch of each rank of an expert-parallel
group. A fixed binary tree adds them up: an even number of leaves is cut in half, an odd one after the largest power of
two. Each expert-parallel group has a contiguous part of the leaves, however long, and adds up the largest whole
branches in it: at most two for each level of the tree. The branches of all groups are then added in the tree's order.
The virtual workers of EasyScale (arXiv 2208.14228) are these leaves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

Branch = tuple[int, int]
"""The first leaf of a branch, and the one after its last."""


@dataclass(frozen=True)
class TreeShape:
    """A tree, and the parts of its leaves that groups of ranks have.

    Attributes:
        shares: leaves of each expert-parallel group, in the order of the leaves.
        group_size: ranks of a group.
    """

    shares: tuple[int, ...]
    group_size: int = 1

    @property
    def leaves(self) -> int:
        """Micro-steps of the global batch."""
        return sum(self.shares)

    @property
    def ranks(self) -> int:
        """Ranks of all groups."""
        return len(self.shares) * self.group_size

    def part(self, group: int) -> Branch:
        """The leaves of a group."""
        first = sum(self.shares[:group])
        return first, first + self.shares[group]

    @functools.cached_property
    def branches(self) -> tuple[tuple[Branch, ...], ...]:
        """The largest whole branches in the leaves of each group, in their order."""
        return tuple(tuple(_inside((0, self.leaves), self.part(group))) for group in range(len(self.shares)))

    def joins(self, group: int, leaf: int) -> int:
        """How many branches of a group end with a leaf: so many pairs of sums become one after it."""
        first, _ = self.part(group)
        branch, found = (0, self.leaves), 0
        while branch[1] - branch[0] > 1:
            found += branch[0] >= first and branch[1] == leaf + 1
            left, right = halves(branch)
            branch = left if leaf < left[1] else right
        return found

    def held(self, group: int) -> tuple[int, int]:
        """The most partial sums of a group while the gradients of a next leaf are computed, and those at the end."""
        most = size = 0
        for leaf in range(*self.part(group)):
            most = max(most, size)
            size += 1 - self.joins(group, leaf)
        return most, size


@functools.lru_cache(maxsize=4096)
def most_sums(shares: tuple[int, ...]) -> tuple[int, int]:
    """``TreeShape.held`` of the groups with most of them."""
    shape = TreeShape(shares)
    # Equal parts of a power of two are equal branches.
    groups = range(1 if len(set(shares)) == 1 and len(shares) & (len(shares) - 1) == 0 else len(shares))
    held = [shape.held(group) for group in groups]
    return max(most for most, _ in held), max(branches for _, branches in held)


def halves(branch: Branch) -> tuple[Branch, Branch]:
    """The two branches that are added up to one of two leaves or more."""
    begin, end = branch
    leaves = end - begin
    middle = begin + (leaves // 2 if leaves % 2 == 0 else 1 << (leaves - 1).bit_length() - 1)
    return (begin, middle), (middle, end)


def _inside(branch: Branch, part: Branch) -> Iterator[Branch]:
    """The largest branches of a tree that lie in a part of the leaves."""
    if part[0] <= branch[0] and branch[1] <= part[1]:
        yield branch
    elif branch[0] < part[1] and part[0] < branch[1]:
        for half in halves(branch):
            yield from _inside(half, part)
