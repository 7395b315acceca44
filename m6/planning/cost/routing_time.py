"""Seconds of bringing tokens to experts on other ranks and back."""

from __future__ import annotations

from m6.planning.cost.work import RoutedRows
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.collectives import latency_of, rate
from m6.planning.machine.profile import Profile
from moe import MoEConfig
from moe.exchange_traffic import StepTraffic, exchange_traffic

# Libraries start the messages to all peers together: each further one is assumed to take a tenth of the first latency.
_MESSAGE = 0.1


def routing_s(moe: MoEConfig, ep_size: int, routed: RoutedRows, nodes: Nodes, profile: Profile) -> tuple[float, float]:
    """Seconds of the exchanges of one layer and micro-batch, in a forward pass and in a backward pass."""
    passes = (
        exchange_traffic(moe, ep_size, routed.tokens, routed.pairs, nodes.devices_per_domain, backward)
        for backward in (False, True)
    )
    forward, backward = (sum(_step_s(step, routed, nodes, profile) for step in steps) for steps in passes)
    return forward, backward


def _step_s(step: StepTraffic, routed: RoutedRows, nodes: Nodes, profile: Profile) -> float:
    """Seconds of one step. What stays in the node and what leaves it are taken to follow each other."""
    near, far = step.num_bytes(routed.to_experts, routed.from_experts)
    crosses = step.near_peers < step.peers
    measured = profile.collective_line("all_to_all", "network" if crosses else "device", step.peers + 1)
    if measured is not None:
        latency, per_byte = measured
        # The measured sizes include the part that a rank keeps.
        return step.collectives * latency + (near + far) * (1 + 1 / step.peers) * per_byte
    inside, between = rate(nodes.links.device, 1, profile), rate(nodes.links.network, nodes.devices_per_node, profile)
    latency = latency_of(nodes.links.network if crosses else nodes.links.device)
    return step.collectives * latency * (1 + _MESSAGE * step.peers) + near / inside + far / between
