"""Seconds of collectives over the two tiers of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass

from m6.planning.cluster import Cluster, Link, Nodes
from m6.planning.profile import CollectiveKind, Profile


@dataclass(frozen=True)
class Group:
    """Ranks of one collective; every device of a node takes part in one such group at the same time.

    Attributes:
        size: ranks of the group.
        per_node: those of them that share a node.
    """

    size: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        return self.size // self.per_node


def neighbours(size: int, nodes: Nodes) -> Group:
    """A group of consecutive ranks."""
    return Group(size, math.gcd(size, nodes.devices_per_node))


def strided(size: int, stride: int, nodes: Nodes) -> Group:
    """A group of ranks r, r + stride, ...: those that hold the same experts."""
    per_node = nodes.devices_per_node // stride if nodes.devices_per_node % stride == 0 else 1
    return Group(size, math.gcd(size, max(1, per_node)))


def collective_s(kind: CollectiveKind, num_bytes: float, group: Group, nodes: Nodes, profile: Profile) -> float:
    """Seconds of one collective.

    ``all_reduce``: reduce-scatter inside the node, all-reduce between nodes of each device's share, all-gather
    inside the node (1807.11205, section 4), each a ring. ``all_gather``: half of that, and a reduce-scatter takes as
    long. ``all_to_all``: every rank sends an equal part to every other, the parts for other nodes through its
    share of the node's network.

    Args:
        num_bytes: what one rank contributes; for ``all_gather`` what it ends up with.
    """
    if group.size == 1 or num_bytes == 0:
        return 0.0
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
        return latency * (group.size - 1) + near / inside + far / between
    rounds = 2 if kind == "all_reduce" else 1
    near = num_bytes * (group.per_node - 1) / group.per_node
    far = num_bytes / group.per_node * (group.num_nodes - 1) / group.num_nodes
    return rounds * (latency * math.ceil(math.log2(group.size)) + near / inside + far / between)


def send_s(num_bytes: float, cluster: Cluster, nodes: Nodes, profile: Profile) -> float:
    """Seconds of a message to a rank of another node, or of the same where there is but one, while all ranks send."""
    between = cluster.num_devices > nodes.devices_per_node
    link, sharers = (nodes.links.network, nodes.devices_per_node) if between else (nodes.links.device, 1)
    return _latency(link) + num_bytes / _rate(link, sharers, profile)


def tier_bytes(kind: CollectiveKind, num_bytes: float, group: Group) -> tuple[float, float]:
    """Bytes that one rank sends inside its node, and to other nodes."""
    if group.size == 1:
        return 0.0, 0.0
    if kind == "all_to_all":
        share = num_bytes / group.size
        return (group.per_node - 1) * share, (group.size - group.per_node) * share
    rounds = 2 if kind == "all_reduce" else 1
    near = num_bytes * (group.per_node - 1) / group.per_node
    far = num_bytes / group.per_node * (group.num_nodes - 1) / group.num_nodes
    return rounds * near, rounds * far


def _rate(link: Link | None, sharers: int, profile: Profile) -> float:
    return math.inf if link is None else link.bandwidth_bytes_per_s / sharers * profile.bandwidth_efficiency


def _latency(link: Link | None) -> float:
    return 0.0 if link is None else link.latency_s
