"""The steps of an exchange between tokens and the ranks of their experts. They depend only on the settings."""

import math
from typing import Literal, NamedTuple

from moe.config import MoEConfig


class ExchangeStep(NamedTuple):
    """One step of the path to an expert's rank: it divides the remaining ranks into ``size`` parts and selects one.

    Attributes:
        kind: the difference between the parts: prototypes, nodes, or (in the last step) ranks.
        size: the number of parts.
    """

    kind: Literal["prototype", "node", "all_to_all"]
    size: int


def exchange_steps(config: MoEConfig, ep_size: int) -> tuple[ExchangeStep, ...]:
    """Chooses the steps of the exchange in a group of ``ep_size`` ranks.

    If ``ranks_per_node`` divides the group there are two levels: first between nodes, then inside them. On each level
    ``config.exchange`` "prototype" divides the ranks by prototype as far as possible, and uses an all-to-all among
    ranks with the same prototype.

    "auto" chooses the exchange with fewer rows. Let k be a token's pairs left after a capacity (all K without a
    capacity), n the ranks of a level, and g the number of parts by prototype. The prototypes' exchange moves g - 1 rows
    for each token between the parts and k (1 - g / n) inside them. The all-to-all moves k (1 - 1 / n): this is
    (g - 1) (k / n - 1) more. So "auto" uses prototypes if k > n, and also if k = n = g. Between nodes a token is sent
    once for all its pairs. Prototypes save nothing there unless g = n and no pair is dropped: then every token goes to
    every node anyway.

    Returns:
        The steps in order; the product of their sizes is ``ep_size``.

    Raises:
        ValueError: ``num_experts``, ``ep_size``, ``ranks_per_node`` or the prototypes do not divide as needed.
    """
    if config.num_experts % ep_size:
        raise ValueError(f"ep_size {ep_size} does not divide num_experts {config.num_experts}")
    ranks_per_node = config.ranks_per_node or ep_size
    if max(ep_size, ranks_per_node) % min(ep_size, ranks_per_node):
        raise ValueError(f"ep_size {ep_size} and ranks_per_node {ranks_per_node}: one must be a multiple of the other")
    ranks_per_node = min(ep_size, ranks_per_node)

    steps = []
    prototypes = config.num_prototypes if config.num_groups == 1 else 1
    for kind, size in (("node", ep_size // ranks_per_node), ("all_to_all", ranks_per_node)):
        parts = math.gcd(size, prototypes)
        pairs = prototypes * config.top_k * config.kept_share
        if kind == "node":
            fewer_rows = parts == size and config.kept_share == 1
        else:
            fewer_rows = pairs > size or (pairs == size == parts)
        if config.exchange == "all_to_all" or (config.exchange == "auto" and not fewer_rows):
            parts = 1
        steps += [ExchangeStep("prototype", parts), ExchangeStep(kind, size // parts)]  # type: ignore[arg-type]
        prototypes = prototypes // parts if parts == size else 1
    steps = [step for step in steps if step.size > 1]
    if config.exchange == "prototype" and all(step.kind != "prototype" for step in steps) and ep_size > 1:
        raise ValueError(
            f'exchange is "prototype", but num_prototypes {config.num_prototypes} and ep_size {ep_size} '
            "have no common divisor"
        )
    return tuple(steps)
