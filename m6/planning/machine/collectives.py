"""Seconds of collectives on a cluster with two tiers: links inside a node, and the network between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from m6.planning.machine.cluster import Cluster, Link, Nodes
from m6.planning.machine.profile import CollectiveKind, Profile


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one collective. All devices of a node are taken to run the same collective at the same time, each
    in a group of its own, so that they share the node's network.

    Attributes:
        size: ranks of the group.
        per_node: ranks of the group on one node.
    """

    size: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes that the group spans."""
        return self.size // self.per_node


def contiguous_group(size: int, nodes: Nodes) -> RankGroup:
    """A group of consecutive ranks."""
    return RankGroup(size, math.gcd(size, nodes.devices_per_node))


def strided_group(size: int, stride: int, nodes: Nodes) -> RankGroup:
    """A group of ranks r, r + stride, ...; with a stride of ``ep_size`` the ranks that hold the same experts."""
    per_node = nodes.devices_per_node // stride if nodes.devices_per_node % stride == 0 else 1
    return RankGroup(size, math.gcd(size, max(1, per_node)))


def collective_s(kind: CollectiveKind, num_bytes: float, group: RankGroup, nodes: Nodes, profile: Profile) -> float:
    """Seconds of one collective, by the profile's measurements or by a model of its algorithm.

    ``all_reduce``: a reduce-scatter inside the node, an all-reduce of each device's share between nodes and an
    all-gather inside the node (1807.11205, section 4), each as a ring. ``all_gather``: half of an all-reduce; a
    reduce-scatter takes as long. ``all_to_all``: every rank sends an equal part to each other rank; the parts for other
    nodes go through the rank's share of the node's network.

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
    inside, between = _rate(nodes.links.device, 1, profile), _rate(nodes.links.network, nodes.devices_per_node, profile)
    latency = _latency(nodes.links.device) if group.per_node > 1 else 0.0
    latency = max(latency, _latency(nodes.links.network) if group.num_nodes > 1 else 0.0)
    if kind == "all_to_all":
        share = num_bytes / group.size
        near, far = (group.per_node - 1) * share, (group.size - group.per_node) * share
        # Every peer gets a message of its own.
        return latency * (group.size - 1) + near / inside + far / between
    rounds = 2 if kind == "all_reduce" else 1
    near = num_bytes * (group.per_node - 1) / group.per_node
    far = num_bytes / group.per_node * (group.num_nodes - 1) / group.num_nodes
    # The latency of a tree: libraries use one for small messages, where latency matters.
    return rounds * (latency * math.ceil(math.log2(group.size)) + near / inside + far / between)


def send_s(num_bytes: float, cluster: Cluster, nodes: Nodes, profile: Profile) -> float:
    """Seconds of a point-to-point message while all ranks send; between nodes where the cluster has several."""
    between = cluster.num_devices > nodes.devices_per_node
    link, sharers = (nodes.links.network, nodes.devices_per_node) if between else (nodes.links.device, 1)
    return _latency(link) + num_bytes / _rate(link, sharers, profile)


def _rate(link: Link | None, sharers: int, profile: Profile) -> float:
    return math.inf if link is None else link.bandwidth_bytes_per_s / sharers * profile.bandwidth_efficiency


def _latency(link: Link | None) -> float:
    return 0.0 if link is None else link.latency_s
