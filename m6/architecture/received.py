"""Elements that a rank receives with each placement, as closed forms of sizes alone.

A ring is counted: gathering parts of n elements over g ranks, or summing them up into such parts, brings a rank
(g - 1) n elements, and an all-reduce of n elements 2 (g - 1) / g n. Shapes are T tokens, hidden size h, inner size f of
a feed-forward, P ranks, and q = P^(1/2) or P^(1/3) ranks along an axis.
"""

from __future__ import annotations

from typing import Literal, get_args

PlacementName = Literal["1d", "2d", "3d"]
PLACEMENTS: tuple[PlacementName, ...] = get_args(PlacementName)
AXES = {"1d": 1, "2d": 2, "3d": 3}


def side(placement: PlacementName, num_ranks: int) -> int | None:
    """Ranks along an axis of the placement's grid; None if ``num_ranks`` is no square or cube."""
    axes = AXES[placement]
    return next((q for q in range(1, num_ranks + 1) if q**axes == num_ranks), None)


def nearest_num_ranks(placement: PlacementName, num_ranks: int) -> int:
    """The number of ranks of at least 2 that has a grid and is nearest."""
    axes = AXES[placement]
    return min((q**axes for q in range(2, num_ranks + 2)), key=lambda number: abs(number - num_ranks))


def received_by_pair(placement: PlacementName, num_ranks: int, tokens: int, hidden: int, inner: int) -> float:
    """Elements that a rank receives for the two products of a feed-forward, forward and backward.

    1-D (Megatron, arXiv 1909.08053, section 3): 4 (P - 1) / P T h. 2-D (SUMMA as in Optimus, arXiv 2104.05343): each
    product moves its input and its matrix three times. 3-D (arXiv 2105.14450): each moves input, matrix and result
    twice, and input and matrix once more, because only their parts are kept for the backward pass.
    """
    q = side(placement, num_ranks)
    assert q is not None, f"{num_ranks} ranks have no grid of {placement}"
    narrow, wide, matrix = tokens * hidden, tokens * inner, hidden * inner
    if placement == "1d":
        return 4 * (q - 1) * narrow / q
    again = narrow + wide + 2 * matrix
    if placement == "2d":
        return 3 * (q - 1) * again / q**2
    return (q - 1) * (4 * (narrow + wide + matrix) + again) / q**3


def received_by_feed_forward(placement: PlacementName, num_ranks: int, tokens: int, hidden: int, inner: int) -> float:
    """The same of a feed-forward between layers whose hidden states are whole on each rank.

    In 2-D and 3-D it gathers its output forward and the gradient of its input backward, and sums up the gradients of
    both biases.
    """
    received = received_by_pair(placement, num_ranks, tokens, hidden, inner)
    if placement != "1d":
        received += 2 * (num_ranks - 1) * (tokens * hidden + inner + hidden) / num_ranks
    return received


def received_by_attention(num_ranks: int, tokens: int, hidden: int) -> float:
    """Elements that a rank receives for the two projections of an attention whose heads are divided (1-D)."""
    return received_by_pair("1d", num_ranks, tokens, hidden, hidden)


def received_by_expert(num_ranks: int, tokens: int, hidden: int) -> float:
    """Elements that one of ``num_ranks`` ranks receives on average if the tokens of an expert, which lie evenly on
    them, go to the rank of the expert and back, forward and backward: 4 (P - 1) / P^2 T h."""
    return 4 * (num_ranks - 1) * tokens * hidden / num_ranks**2
