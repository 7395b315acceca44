"""Seconds of collectives on a cluster with two tiers: links inside a node, and the network between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from m6.planning.machine.cluster import Cluster, Link, Nodes
from m6.planning.machine.profile import Profile


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one collective. All devices of a node are taken to run the same collective at the same time, each
    in a group of its own, so that they share the node's network.

    Attributes:
        size: ranks of the group.
        per_node: ranks of the group that the device link joins: on one node, or on the nodes of one domain.
    """

    size: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes that the group spans."""
        return self.size // self.per_node


def contiguous_group(size: int, nodes: Nodes) -> RankGroup:
    """A group of consecutive ranks."""
    return RankGroup(size, math.gcd(size, nodes.devices_per_domain))


def strided_group(size: int, stride: int, nodes: Nodes) -> RankGroup:
    """A group of ranks r, r + stride, ...; with a stride of ``ep_size`` the ranks that hold the same experts."""
    per_node = nodes.devices_per_domain // stride if nodes.devices_per_domain % stride == 0 else 1
    return RankGroup(size, math.gcd(size, max(1, per_node)))


def collective_s(
    kind: Literal["all_reduce", "all_gather"], num_bytes: float, group: RankGroup, nodes: Nodes, profile: Profile
) -> float:
    """Seconds of one collective, by the profile's measurements or by a model of its algorithm.

    ``all_reduce``: a reduce-scatter inside the node, an all-reduce of each device's share between nodes and an
    all-gather inside the node (1807.11205, section 4), each as a ring. ``all_gather``: half of an all-reduce; a
    reduce-scatter takes as long.

    Args:
        num_bytes: input of one rank; for ``all_gather`` its output.
    """
    if group.size == 1 or num_bytes == 0:
        return 0.0
    # Measurements come first: they know the algorithm that the library chose.
    tier = "network" if group.num_nodes > 1 else "device"
    measured = profile.collective_line(kind, tier, group.size)
    if measured is not None:
        latency, per_byte = measured
        return latency + num_bytes * per_byte
    inside, between = rate(nodes.links.device, 1, profile), rate(nodes.links.network, nodes.devices_per_node, profile)
    latency = latency_of(nodes.links.device) if group.per_node > 1 else 0.0
    latency = max(latency, latency_of(nodes.links.network) if group.num_nodes > 1 else 0.0)
    rounds = 2 if kind == "all_reduce" else 1
    near = num_bytes * (group.per_node - 1) / group.per_node
    far = num_bytes / group.per_node * (group.num_nodes - 1) / group.num_nodes
    # The latency of a tree: libraries use one for small messages, where latency matters.
    return rounds * (latency * math.ceil(math.log2(group.size)) + near / inside + far / between)


def send_s(num_bytes: float, cluster: Cluster, nodes: Nodes, profile: Profile) -> float:
    """Seconds of a point-to-point message while all ranks send; between nodes where the cluster has several."""
    between = cluster.num_devices > nodes.devices_per_node
    link, sharers = (nodes.links.network, nodes.devices_per_node) if between else (nodes.links.device, 1)
    return latency_of(link) + num_bytes / rate(link, sharers, profile)


def rate(link: Link | None, sharers: int, profile: Profile) -> float:
    """Bytes a second that a rank attains on a link that ``sharers`` ranks share."""
    return math.inf if link is None else link.bandwidth_bytes_per_s / sharers * profile.link_efficiency


def latency_of(link: Link | None) -> float:
    """Seconds of the smallest message."""
    return 0.0 if link is None else link.latency_s
