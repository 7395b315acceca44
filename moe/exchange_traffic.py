"""What an exchange sends, in closed form: the expectation over routers that choose all experts equally often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from moe.config import MoEConfig
from moe.expert_parallel import exchange_steps

_GATE_BYTES, _POSITION_BYTES, _NUMBER_BYTES = 4, 4, 8  # float32, int32, int64


@dataclass(frozen=True)
class StepTraffic:
    """What each rank sends in one step of an exchange, in one pass through one layer.

    Attributes:
        peers: the other ranks of the step's group.
        near_peers: those of them on the rank's own node.
        rows: rows to other ranks, the same number towards the experts and back.
        other_bytes: bytes of gates and positions to other ranks, and of the numbers that tell how much comes.
        number_bytes: those of the numbers, which are exchanged before all else, by one collective for each part.
        collectives: how many collectives the step has in all parts; each sends a message to every peer.
    """

    peers: int
    near_peers: int
    rows: float
    other_bytes: float
    number_bytes: float
    collectives: int

    def num_bytes(self, to_experts: float, from_experts: float) -> tuple[float, float]:
        """Bytes within the node and to other nodes.

        Args:
            to_experts: bytes of a row on the way to the experts.
            from_experts: bytes of a row on the way back.
        """
        total = self.rows * (to_experts + from_experts) + self.other_bytes
        near = total * self.near_peers / self.peers
        return near, total - near

    @property
    def messages(self) -> tuple[int, int]:
        """Messages within the node and to other nodes."""
        near = self.collectives * self.near_peers
        return near, self.collectives * self.peers - near


def exchange_traffic(
    config: MoEConfig, ep_size: int, tokens: float, pairs: float, ranks_per_node: int, backward: bool = False
) -> tuple[StepTraffic, ...]:
    """Returns what each rank sends in every step of ``exchange_steps``.

    Args:
        config: of the layer.
        ep_size: ranks that share the experts.
        tokens: tokens of each rank.
        pairs: (token, expert) pairs of each rank that a capacity left over.
        ranks_per_node: neighbouring ranks on a node of the machine. ``config.ranks_per_node`` is what the exchange
            takes for it.
        backward: in the backward pass: no numbers and positions, and the gradients of gates.

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
        if step.kind == "all_to_all":  # its rows are pairs, whose gates stay
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
    """Returns the expected number of nodes that have an expert for a token.

    A token chooses its groups, all equally likely, then ``top_k`` different experts of each prototype in them, all
    equally likely, and a capacity leaves each choice over with probability ``kept``. A node has consecutive experts: a
    part of a group, or whole groups of which h are the token's with a hypergeometric probability. With e_z of the M'
    experts of prototype z that the token may choose, the node is left out with probability

        prod_z sum_i C(e_z, i) C(M' - e_z, top_k - i) / C(M', top_k) * (1 - kept)^i

    Args:
        prototypes: those of the nodes, all or, after an exchange by prototypes, some.
        num_nodes: divides ``num_groups`` or is a multiple of it.
    """
    groups, chosen = config.num_groups, config.groups_per_token
    in_group = config.experts_per_prototype // groups
    allowed = chosen * in_group

    def left_out(own: int) -> float:
        """The probability that no choice of a prototype, of which a node has ``own`` allowed experts, is left over."""
        ways = (math.comb(own, i) * math.comb(allowed - own, config.top_k - i) for i in range(config.top_k + 1))
        return sum(way * (1 - kept) ** i for i, way in enumerate(ways)) / math.comb(allowed, config.top_k)

    if groups >= num_nodes:
        each = groups // num_nodes
        of_nodes = 0.0
        for own in range(max(0, chosen - groups + each), min(each, chosen) + 1):
            probability = math.comb(each, own) * math.comb(groups - each, chosen - own) / math.comb(groups, chosen)
            of_nodes += probability * (1 - left_out(own * in_group) ** prototypes)
        return num_nodes * of_nodes
    expected, experts = 0.0, prototypes * config.experts_per_prototype // num_nodes
    for node in range(num_nodes // groups):  # of one group; the others are alike
        first, end, none = node * experts, (node + 1) * experts, 1.0
        for prototype in range(first // in_group, -(-end // in_group)):
            none *= left_out(min(end, (prototype + 1) * in_group) - max(first, prototype * in_group))
        expected += 1 - none
    return chosen * expected
