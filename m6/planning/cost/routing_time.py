"""Seconds of bringing tokens to experts on other ranks and back, and how many of them computation hides."""

from __future__ import annotations

from dataclasses import dataclass

from m6.planning.cost.work import RoutedRows
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.collectives import latency_of, rate
from m6.planning.machine.profile import Profile
from moe import MoEConfig
from moe.exchange_traffic import StepTraffic, exchange_traffic
from moe.overlap_clock import span

# Libraries start the messages to all peers together: each further one is assumed to take a tenth of the first latency.
_MESSAGE = 0.1


@dataclass(frozen=True)
class RoutingTime:
    """Seconds of the exchanges of tokens.

    Attributes:
        exposed: in which computation waits for them.
        hidden: in which computation runs beside them.
    """

    exposed: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: RoutingTime) -> RoutingTime:
        return RoutingTime(self.exposed + other.exposed, self.hidden + other.hidden)

    def __mul__(self, times: float) -> RoutingTime:
        return RoutingTime(self.exposed * times, self.hidden * times)


class RoutingTimes:
    """Prices the exchanges of layers with the settings ``moe`` in groups of ``ep_size`` ranks.

    Args:
        factor: multiplies the seconds of exchanges: the profile's, divided by a rank's share of a core.
    """

    def __init__(self, moe: MoEConfig, ep_size: int, nodes: Nodes, profile: Profile, factor: float) -> None:
        self.moe, self.ep_size, self.nodes, self.profile, self.factor = moe, ep_size, nodes, profile, factor

    def __call__(self, routed: RoutedRows, experts: float, shared: float, passes: int) -> RoutingTime:
        """Seconds of one layer and micro-batch.

        Args:
            experts: seconds of the experts in a forward pass, which a backward pass takes twice.
            shared: the same of the shared experts.
            passes: the cost of all passes in forward passes, see ``TimeModel``.
        """
        forward, backward = (self._pass(routed, experts, shared, backward) for backward in (False, True))
        return forward * (passes - 2) + backward

    def _pass(self, routed: RoutedRows, experts: float, shared: float, backward: bool) -> RoutingTime:
        steps = exchange_traffic(
            self.moe, self.ep_size, routed.tokens, routed.pairs, self.nodes.devices_per_domain, backward
        )
        parts, once = self.moe.overlap_parts, (2 if backward else 1) / self.moe.overlap_parts
        numbers = sum(self._seconds(step, step.number_bytes, 0 if backward else parts) for step in steps)
        back = [self._seconds(step, step.rows * routed.from_experts, parts) / parts for step in reversed(steps)]
        there = [
            self._seconds(
                step,
                step.rows * routed.to_experts + step.other_bytes - step.number_bytes,
                step.collectives - (1 if backward else 2) * parts,
            )
            / parts
            for step in steps
        ]
        if self.nodes.links.host is None:  # a CPU: its cores also run the exchanges
            return RoutingTime(numbers + parts * (sum(there) + sum(back)))
        found = span(there, once * experts, back, parts, once * shared, backward)
        return RoutingTime(numbers + found.exposed, found.hidden)

    def _seconds(self, step: StepTraffic, num_bytes: float, collectives: int) -> float:
        """Seconds of a share of a step. What stays in the node and what leaves it are taken to follow each other."""
        crosses = step.near_peers < step.peers
        measured = self.profile.collective_line("all_to_all", "network" if crosses else "device", step.peers + 1)
        if measured is not None:
            latency, per_byte = measured
            # The measured sizes include the part that a rank keeps.
            return self.factor * (collectives * latency + num_bytes * (1 + 1 / step.peers) * per_byte)
        links, near = self.nodes.links, num_bytes * step.near_peers / step.peers
        inside = rate(links.device, 1, self.profile)
        between = rate(links.network, self.nodes.devices_per_node, self.profile)
        latency = latency_of(links.network if crosses else links.device)
        messages = collectives * latency * (1 + _MESSAGE * step.peers)
        return self.factor * (messages + near / inside + (num_bytes - near) / between)
