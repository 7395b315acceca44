"""Seconds of bringing tokens to experts on other ranks and back, and how many of them computation hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from m6.planning.cost.work import RoutedRows
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.collectives import latency_of, rate
from m6.planning.machine.profile import Profile
from moe import MoEConfig
from moe.exchange_traffic import StepTraffic, exchange_traffic
from moe.overlap_clock import span, span_of_turns

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


class _Hops(NamedTuple):
    """Seconds of a layer's exchanges.

    Attributes:
        numbers: of all numbers.
        there: of rows towards the experts, hop by hop.
        back: of rows back.
        links: 1 for hops to the experts through the network, 0 for those inside of a node.
    """

    numbers: float
    there: list[float]
    back: list[float]
    links: list[int]


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

    def in_turns(
        self,
        routed: RoutedRows,
        experts: float,
        beside: float,
        num_layers: int,
        at_once: int,
        deferred: float = 0.0,
    ) -> RoutingTime:
        """Seconds of one micro-batch in all layers if ``at_once`` of them take turns, forward and backward.

        Args:
            experts: as above.
            beside: seconds of all else that is computed for a layer in a forward pass, and twice in a backward pass.
            deferred: seconds of gradients, a part of what is computed beside in the backward pass, that may wait.
        """
        forward = self._turns(routed, experts, beside, num_layers, at_once, False)
        return forward + self._turns(routed, experts, beside, num_layers, at_once, True, deferred)

    def in_turns_of_layers(
        self, routed: RoutedRows, experts: float, beside: float, num_layers: int, at_once: int
    ) -> RoutingTime:
        """The same with activation checkpointing: they take turns in each layer alone, and forward passes run twice."""
        forward, backward = (
            self._turns(routed, experts, beside, 1, at_once, is_backward) for is_backward in (False, True)
        )
        return (forward * 2 + backward) * num_layers

    def _turns(
        self,
        routed: RoutedRows,
        experts: float,
        beside: float,
        num_layers: int,
        at_once: int,
        backward: bool,
        deferred: float = 0.0,
    ) -> RoutingTime:
        hops, times = self._hops(routed, backward, parts=1), 2 if backward else 1
        numbers = num_layers * hops.numbers
        if self.nodes.links.host is None:
            return RoutingTime(numbers + num_layers * (sum(hops.there) + sum(hops.back)))
        seconds = (hops.there, times * experts, hops.back, at_once, num_layers, times * beside)
        found = span_of_turns(*seconds, backward, hops.links, deferred)
        return RoutingTime(numbers + found.exposed / at_once, found.hidden / at_once)

    def _pass(self, routed: RoutedRows, experts: float, shared: float, backward: bool) -> RoutingTime:
        parts, once = self.moe.overlap_parts, (2 if backward else 1) / self.moe.overlap_parts
        hops = self._hops(routed, backward, parts)
        if self.nodes.links.host is None:  # a CPU: its cores also run the exchanges
            return RoutingTime(hops.numbers + parts * (sum(hops.there) + sum(hops.back)))
        found = span(hops.there, once * experts, hops.back, parts, once * shared, backward, hops.links)
        return RoutingTime(hops.numbers + found.exposed, found.hidden)

    def _hops(self, routed: RoutedRows, backward: bool, parts: int) -> _Hops:
        """Seconds of the exchanges of one of ``parts`` parts, and of all their numbers."""
        steps = exchange_traffic(
            self.moe, self.ep_size, routed.tokens, routed.pairs, self.nodes.devices_per_domain, backward
        )
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
        return _Hops(numbers, there, back, [int(step.near_peers < step.peers) for step in steps])

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
