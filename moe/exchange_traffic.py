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
                reached = nodes_of_token(size, experts, prototypes, config.experts_per_prototype, config.top_k, kept)
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
def nodes_of_token(
    num_nodes: int, experts_per_node: int, prototypes: int, experts_per_prototype: int, top_k: int, kept: float
) -> float:
    """Returns the expected number of nodes that have an expert for a token.

    A token chooses ``top_k`` different experts of each prototype, all equally likely, and a capacity leaves each choice
    over with probability ``kept``. The experts of a node are consecutive, prototype by prototype. With e_z experts of
    prototype z on a node, the node is left out with probability

        prod_z sum_i C(e_z, i) C(M - e_z, top_k - i) / C(M, top_k) * (1 - kept)^i
    """
    expected = 0.0
    for node in range(num_nodes):
        first, left_out = node * experts_per_node, 1.0
        end = first + experts_per_node
        for prototype in range(first // experts_per_prototype, min(prototypes, -(-end // experts_per_prototype))):
            begin = prototype * experts_per_prototype
            own = min(end, begin + experts_per_prototype) - max(first, begin)
            choices = math.comb(experts_per_prototype, top_k)
            left_out *= sum(
                math.comb(own, i) * math.comb(experts_per_prototype - own, top_k - i) / choices * (1 - kept) ** i
                for i in range(top_k + 1)
            )
        expected += 1 - left_out
    return expected
