"""Communication volume of each placement: elements received by a rank, as closed forms of the sizes.

All collectives count as rings. In an all-gather or a reduce-scatter with parts of n elements over g ranks, a rank
receives (g - 1) n elements; in an all-reduce of n elements, 2 (g - 1) / g n. Symbols are T tokens, hidden size h, inner
size f of a feed-forward, P ranks, and q = P^(1/2) or P^(1/3) ranks along an axis.
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
    """The nearest number of ranks with a grid, at least 2."""
    axes = AXES[placement]
    return min((q**axes for q in range(2, num_ranks + 2)), key=lambda number: abs(number - num_ranks))


def volume_of_pair(placement: PlacementName, num_ranks: int, tokens: int, hidden: int, inner: int) -> float:
    """Elements received by a rank for the two matmuls of a feed-forward, forward and backward.

    1-D (Megatron, arXiv 1909.08053, section 3): 4 (P - 1) / P T h. 2-D (SUMMA as in Optimus, arXiv 2104.05343): each
    matmul moves its input and its matrix three times. 3-D (arXiv 2105.14450): each moves input, matrix and result
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


def volume_of_feed_forward(placement: PlacementName, num_ranks: int, tokens: int, hidden: int, inner: int) -> float:
    """Elements received by a rank for a feed-forward between replicated hidden states, forward and backward.

    2-D and 3-D also all-gather the output in the forward pass and the gradient of the input in the backward pass, and
    all-reduce the gradients of both biases.
    """
    received = volume_of_pair(placement, num_ranks, tokens, hidden, inner)
    if placement != "1d":
        received += 2 * (num_ranks - 1) * (tokens * hidden + inner + hidden) / num_ranks
    return received


def volume_of_attention(num_ranks: int, tokens: int, hidden: int) -> float:
    """Elements received by a rank for the two projections of an attention with sharded heads (1-D)."""
    return volume_of_pair("1d", num_ranks, tokens, hidden, hidden)


def volume_of_divided_tokens(num_ranks: int, tokens: int, hidden: int, num_layers: int) -> float:
    """Elements received by a rank in addition if tokens are divided between the products of 1-D (arXiv 2205.05198).

    An all-gather and a reduce-scatter receive as much as the all-reduces that they replace. Of the inputs of two
    products in each layer only parts are kept, so the backward pass gathers them again. At both ends of the layers
    there is an all-gather more. The gradients of four vectors of the norms and two of biases in each layer are summed.

    Args:
        tokens: T, a multiple of P.
    """
    share = (num_ranks - 1) / num_ranks
    return share * ((2 * num_layers + 2) * tokens * hidden + 12 * num_layers * hidden)


def volume_of_vocabulary(num_ranks: int, tokens: int, targets: int, hidden: int) -> float:
    """Elements received by a rank for a token embedding with divided rows, which is the head's matrix, too.

    All-reduces of the embeddings of T tokens forward, and backward of the gradients of N targets' hidden states:
    2 (P - 1) / P (T + N) h. For each target an all-gather and an all-reduce of one number: (P - 1) (1 + 2 / P) N.
    """
    others = num_ranks - 1
    return 2 * others * (tokens + targets) * hidden / num_ranks + others * (1 + 2 / num_ranks) * targets


def volume_of_expert(num_ranks: int, tokens: int, hidden: int) -> float:
    """Elements received by a rank on average for one expert, forward and backward: 4 (P - 1) / P^2 T h.

    The expert's tokens lie evenly on ``num_ranks`` ranks. They go to the expert's rank (dispatch) and back (combine).
    """
    return 4 * (num_ranks - 1) * tokens * hidden / num_ranks**2
