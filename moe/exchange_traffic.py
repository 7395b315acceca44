"""Expected traffic of an exchange in closed form, for routers that choose all experts equally often."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache

from moe.config import MoEConfig
from moe.exchange_steps import exchange_steps

_GATE_BYTES, _POSITION_BYTES, _NUMBER_BYTES = 4, 4, 8  # float32, int32, int64


@dataclass(frozen=True)
class StepTraffic:
    """Traffic from each rank in one step of an exchange, in one pass through one layer.

    Attributes:
        peers: the number of other ranks in the step's group.
        near_peers: the number of peers on the rank's own node.
        rows: rows to other ranks; the combine has as many as the dispatch.
        other_bytes: bytes of gates, positions and counts to other ranks.
        number_bytes: bytes of the counts, sent first, by one collective for each part; included in ``other_bytes``.
        collectives: the number of collectives of all parts; each sends a message to every peer.
    """

    peers: int
    near_peers: int
    rows: float
    other_bytes: float
    number_bytes: float
    collectives: int

    def num_bytes(self, to_experts: float, from_experts: float) -> tuple[float, float]:
        """Returns the bytes sent within the node, and to other nodes.

        Args:
            to_experts: bytes of a row in the dispatch.
            from_experts: bytes of a row in the combine.
        """
        total = self.rows * (to_experts + from_experts) + self.other_bytes
        near = total * self.near_peers / self.peers
        return near, total - near


def exchange_traffic(
    config: MoEConfig, ep_size: int, tokens: float, pairs: float, ranks_per_node: int, backward: bool = False
) -> tuple[StepTraffic, ...]:
    """Returns each rank's traffic in every step of ``exchange_steps``.

    Args:
        config: of the layer.
        ep_size: the size of the expert-parallel group.
        tokens: tokens of each rank.
        pairs: (token, expert) pairs of each rank, without pairs dropped by a capacity.
        ranks_per_node: neighbouring ranks on a node of the machine. The exchange itself assumes
            ``config.ranks_per_node``.
        backward: for the backward pass, without counts and positions, but with the gradients of gates.

    Raises:
        ValueError: as ``exchange_steps``.
    """
    steps = []
    rows, experts, prototypes, stride = tokens, config.num_experts, config.num_prototypes, ep_size
    kept = pairs / (tokens * config.experts_per_token) if tokens else 0.0
    for step in exchange_steps(config, ep_size):
        size, others = step.size, step.size - 1
        stride //= size
        experts //= size
        near_peers = min(size, max(1, ranks_per_node // stride)) - 1
        far_pairs, numbers, collectives, reached = pairs * others / size, experts, 2, 1.0
        if step.kind == "all_to_all":  # its rows are pairs; their gates are not sent
            sent_rows, gates = far_pairs, 0.0
        else:
            gates, numbers, collectives = far_pairs, experts + 1, 3
            if step.kind == "prototype":
                sent_rows, reached = rows * others, float(size)
                prototypes //= size
            else:
                reached = nodes_of_token(config, prototypes, size, kept)
                sent_rows = rows * reached * others / size
        other_bytes, number_bytes = gates * _GATE_BYTES, 0.0
        if not backward:
            number_bytes = float(config.overlap_parts * others * numbers * _NUMBER_BYTES)
            other_bytes += gates * _POSITION_BYTES + number_bytes
            collectives += 1 if step.kind == "all_to_all" else 2
        collectives *= config.overlap_parts
        steps.append(StepTraffic(others, near_peers, sent_rows, other_bytes, number_bytes, collectives))
        rows *= reached
    return tuple(steps)


@lru_cache(maxsize=1024)
def nodes_of_token(config: MoEConfig, prototypes: int, num_nodes: int, kept: float) -> float:
    """Returns the expected number of nodes with an expert for a token.

    A token first chooses its groups, all equally likely. In them it chooses ``top_k`` different experts of each
    prototype, all equally likely. A capacity keeps each choice with probability ``kept``. The token may choose among M'
    experts of prototype z; e_z of them are on the node. The node receives nothing with the probability

        prod_z sum_i C(e_z, i) C(M' - e_z, top_k - i) / C(M', top_k) * (1 - kept)^i

    A node has consecutive experts: whole groups and parts of up to two more. Only experts in the token's groups count
    for e_z. The number of the token's whole groups on the node has a hypergeometric distribution.

    Args:
        prototypes: the number of prototypes on these nodes: all, or fewer after an exchange by prototypes.
    """
    in_group = config.experts_per_prototype // config.num_groups
    group_size = in_group * prototypes
    size = group_size * config.num_groups // num_nodes
    contents = Counter(
        _groups_of_node(node * size, (node + 1) * size, in_group, prototypes) for node in range(num_nodes)
    )
    return sum(count * (1 - _left_out(config, prototypes, each, kept)) for each, count in contents.items())


def _groups_of_node(first: int, end: int, in_group: int, prototypes: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Returns the number of whole groups among experts ``first`` to ``end``, and for each partial group the number of
    experts of each prototype."""
    whole, parts = 0, []
    group_size = in_group * prototypes
    for begin in range(first // group_size * group_size, end, group_size):
        starts = range(begin, begin + group_size, in_group)
        own = tuple(max(0, min(end, start + in_group) - max(first, start)) for start in starts)
        if sum(own) == group_size:
            whole += 1
        else:
            parts.append(own)
    return whole, tuple(parts)


def _left_out(
    config: MoEConfig, prototypes: int, of_node: tuple[int, tuple[tuple[int, ...], ...]], kept: float
) -> float:
    """Returns the probability of a token without an expert on a node with these groups, see ``_groups_of_node``."""
    groups, chosen, top_k = config.num_groups, config.groups_per_token, config.top_k
    in_group = config.experts_per_prototype // groups
    allowed, (whole, parts) = chosen * in_group, of_node

    @cache
    def none_of(own: int) -> float:
        ways = (math.comb(own, i) * math.comb(allowed - own, top_k - i) for i in range(top_k + 1))
        return sum(way * (1 - kept) ** i for i, way in enumerate(ways)) / math.comb(allowed, top_k)

    probability, others = 0.0, groups - whole - len(parts)
    for taken in itertools.product((False, True), repeat=len(parts)):
        own_parts = [part for part, is_taken in zip(parts, taken, strict=True) if is_taken]
        for number in range(min(whole, chosen - len(own_parts)) + 1):
            rest = chosen - len(own_parts) - number
            likely = math.comb(whole, number) * math.comb(others, rest) / math.comb(groups, chosen)
            if likely:
                own = [number * in_group + sum(part[z] for part in own_parts) for z in range(prototypes)]
                probability += likely * math.prod(map(none_of, own))
    return probability
