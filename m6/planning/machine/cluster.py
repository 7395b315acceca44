"""Clusters: descriptions in ``configs/clusters/*.json``, the cluster of this process, and seconds of collectives.

Rates are peaks from data sheets or published measurements; ``source`` names them. The attained share of a peak is in
:mod:`m6.planning.machine.profile`. A collective has two tiers: links inside a node, and the network.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from m6.errors import UserError, nearest
from m6.planning.machine.profile import Profile
from m6.runs.environment import ranks_per_node
from m6.shipped import CONFIGS, shipped_file
from m6.validation import Section, read_model

CLUSTERS = CONFIGS / "clusters"
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
_ALL_NODES = 8  # up to which every number of nodes is a part of a cluster
NonEmptyText = Annotated[str, Field(min_length=1)]


class Device(Section):
    """An accelerator, or one rank's part of a CPU."""

    name: NonEmptyText = Field(description="the name that the driver reports, or a part of it")
    memory_bytes: PositiveInt = Field(description="memory of the device")
    matmul_flops: dict[str, PositiveFloat] = Field(description="peak FLOP/s of dense matrix products, by data type")
    memory_bandwidth_bytes_per_s: PositiveFloat = Field(description="peak of reading or writing device memory")
    grouped_dtypes: list[str] = Field(
        description="data types in which one kernel multiplies the rows of all experts; in others each has its own"
    )
    source: NonEmptyText = Field(description="where the figures come from")

    @model_validator(mode="after")
    def _check_types(self) -> Device:
        for key, names in (("matmul_flops", self.matmul_flops), ("grouped_dtypes", self.grouped_dtypes)):
            for name in names:
                if name not in DTYPES:
                    raise ValueError(f"{key}: unknown data type {name!r}{nearest(name, DTYPES)}")
        if "fp32" not in self.matmul_flops:
            raise ValueError('matmul_flops: "fp32" is missing; every device computes in it')
        return self

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in ``dtype``; the rate of fp32 where the device has no matrix units for ``dtype``."""
        return self.matmul_flops.get(dtype, self.matmul_flops["fp32"])


class Link(Section):
    """A connection, in one direction."""

    bandwidth_bytes_per_s: PositiveFloat = Field(description="peak, one direction")
    latency_s: float = Field(ge=0, description="seconds of the smallest message")
    source: NonEmptyText = Field(description="where the figures come from")


class Links(Section):
    """The connections of one node."""

    device: Link | None = Field(
        None, description="between the devices of a node, for each device; none: one device a node"
    )
    network: Link | None = Field(None, description="between nodes, for a whole node; its devices share it")
    host: Link | None = Field(
        None, description="between host memory and one device; none: both are the same memory (a CPU)"
    )


class Host(Section):
    """The CPUs and the host memory of a node, shared by its devices."""

    cpus: PositiveInt = Field(description="cores of the node")
    memory_bytes: PositiveInt = Field(description="host memory of the node")
    memory_bandwidth_bytes_per_s: PositiveFloat = Field(
        description="peak of reading or writing host memory, whole node"
    )
    source: NonEmptyText = Field(description="where the figures come from")


class Nodes(Section):
    """A number of equal nodes."""

    count: PositiveInt = Field(description="how many nodes")
    devices_per_node: PositiveInt = Field(description="ranks of one node")
    nodes_per_domain: PositiveInt = Field(
        1, description="nodes whose devices the device link joins: 18 in an NVL72 rack; elsewhere 1"
    )
    device: Device
    host: Host
    links: Links

    @property
    def num_devices(self) -> int:
        """Devices of all these nodes."""
        return self.count * self.devices_per_node

    def fewer_devices(self) -> list[int]:
        """Smaller numbers of devices, descending: of whole nodes, then within one node.

        A batch may divide among any number of nodes better than among more of them. Of a large number of nodes only
        powers of two and divisors are taken, since each one is a search.
        """
        nodes = [n for n in range(1, self.count) if n <= _ALL_NODES or self.count % n == 0 or n.bit_count() == 1]
        within = [n for n in range(1, self.devices_per_node) if n.bit_count() == 1]
        return [*within, *(n * self.devices_per_node for n in nodes)][::-1]

    @property
    def devices_per_domain(self) -> int:
        """Number of devices joined by the device link."""
        return self.devices_per_node * min(self.nodes_per_domain, self.count)


class Cluster(Section):
    """Nodes of one or more types, joined by a network."""

    name: NonEmptyText = Field(description="the name in reports")
    nodes: list[Nodes] = Field(min_length=1, description="types of nodes")

    @model_validator(mode="after")
    def _check_links(self) -> Cluster:
        total = sum(node_type.count for node_type in self.nodes)
        for index, node_type in enumerate(self.nodes):
            if node_type.devices_per_domain > 1 and node_type.links.device is None:
                raise ValueError(
                    f"nodes.{index}.links.device: missing, but it would join {node_type.devices_per_domain} devices"
                )
            if total > 1 and node_type.links.network is None:
                raise ValueError(f"nodes.{index}.links.network: missing, but there are {total} nodes")
        return self

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(node_type.num_devices for node_type in self.nodes)

    @property
    def is_mixed(self) -> bool:
        """Whether the nodes have different devices."""
        return len({node_type.device.name for node_type in self.nodes}) > 1

    @cached_property
    def smallest(self) -> Nodes:
        """The nodes with the least device memory. All ranks get equal work, so a layout must fit these."""
        return min(self.nodes, key=lambda node_type: node_type.device.memory_bytes)

    def slowest(self, dtype: str) -> Nodes:
        """The nodes with the lowest FLOP/s in ``dtype``. All ranks get equal work, so the others wait for these."""
        return min(self.nodes, key=lambda node_type: node_type.device.flops(dtype))

    def types_of(self, first: int, count: int) -> list[Nodes]:
        """The types of ``count`` devices from the number ``first`` on, in the order of the file."""
        found, begin = [], 0
        for node_type in self.nodes:
            end = begin + node_type.num_devices
            if begin < first + count and first < end:
                found.append(node_type)
            begin = end
        return found

    def first(self, num_devices: int) -> Cluster:
        """The first ``num_devices`` of the cluster: whole nodes in the order of the file, or a part of one node.

        Raises:
            UserError: the cluster has fewer devices, or ``num_devices`` is not a whole number of nodes.
        """
        if not 1 <= num_devices <= self.num_devices:
            raise UserError(f"{num_devices} devices: {self.name} has {self.num_devices}")
        kinds: list[Nodes] = []
        left = num_devices
        for node_type in self.nodes:
            if left == 0:
                break
            if not kinds and left < node_type.devices_per_node:
                kinds.append(node_type.model_copy(update={"count": 1, "devices_per_node": left}))
                left = 0
                break
            count = min(node_type.count, left // node_type.devices_per_node)
            if count:
                kinds.append(node_type.model_copy(update={"count": count}))
                left -= count * node_type.devices_per_node
        if left:
            sizes = sorted({node_type.devices_per_node for node_type in self.nodes})
            raise UserError(
                f"{num_devices} devices: {self.name} has nodes of {', '.join(map(str, sizes))}; take whole nodes"
            )
        return Cluster(name=self.name, nodes=kinds)

    def parts(self) -> list[Cluster]:
        """Parts of the cluster. A part may train a run sooner than all devices.

        The parts are each choice of types of nodes, also with fewer nodes of one of the types (see
        ``fewer_devices``). For a single type they are also a part of one node (1, 2, 4, ... devices).
        """
        found: list[Cluster] = []
        for number in range(1, len(self.nodes) + 1):
            for types in itertools.combinations(self.nodes, number):
                names = " and ".join(node_type.device.name for node_type in types)
                name = self.name if len(types) == len(self.nodes) else f"{self.name}, its {names} alone"
                some = Cluster(name=name, nodes=list(types))
                if some.num_devices < self.num_devices:
                    found.append(some)
                found += map(some.first, types[0].fewer_devices()) if number == 1 else some.with_fewer_nodes()
        return found

    def with_fewer_nodes(self) -> list[Cluster]:
        """The cluster with fewer nodes of one type, of each type; see ``fewer_devices``."""
        found: list[Cluster] = []
        for place, node_type in enumerate(self.nodes):
            for count in (n // node_type.devices_per_node for n in node_type.fewer_devices()):
                if count:
                    nodes = [*self.nodes]
                    nodes[place] = node_type.model_copy(update={"count": count})
                    name = f"{self.name}, with {count} of {node_type.count} nodes of {node_type.device.name}"
                    found.append(Cluster(name=name, nodes=nodes))
        return found

    def scaled(self, num_devices: int) -> Cluster:
        """The first ``num_devices`` of the cluster; if it has fewer, a larger cluster of the same nodes.

        Raises:
            UserError: ``num_devices`` is not a whole number of nodes, or exceeds a cluster of several types of nodes.
        """
        if num_devices <= self.num_devices or len(self.nodes) > 1:
            return self.first(num_devices)
        return self.resized(num_devices).model_copy(update={"name": f"{self.name}, scaled up"})

    def resized(self, num_devices: int) -> Cluster:
        """A cluster of ``num_devices`` in nodes of the first type. ``num_devices`` may exceed the cluster's own.

        Raises:
            UserError: ``num_devices`` is not a whole number of nodes.
        """
        node_type = self.nodes[0]
        per_node = min(node_type.devices_per_node, num_devices)
        if num_devices > per_node and node_type.links.network is None:
            raise UserError(f"{num_devices} devices: {self.name} is one node without a network")
        if num_devices % per_node:
            raise UserError(f"{num_devices} devices are not a whole number of nodes of {per_node}")
        update = {"count": num_devices // per_node, "devices_per_node": per_node}
        return Cluster(name=self.name, nodes=[node_type.model_copy(update=update)])


def load_cluster(path: Path) -> Cluster:
    """Reads a cluster's JSON, a file or the name of a shipped one.

    Raises:
        UserError: a missing file, broken JSON, or a wrong key or value; the message names it.
    """
    return read_model(Cluster, shipped_file(path, "cluster"))


def detect_cluster(world_size: int) -> Cluster:
    """A cluster of nodes like this one, for ``world_size`` ranks.

    Memory and cores are measured. Rates come from the shipped description of the device. The number of ranks on a node
    comes from the launcher's environment variables.

    Raises:
        UserError: no shipped description has this device, or it has no network and the ranks span several nodes.
    """
    import torch  # here, since descriptions are read without it

    per_node = ranks_per_node(world_size)
    known = _described("CPU core" if not torch.cuda.is_available() else torch.cuda.get_device_name())
    if world_size > per_node and known.links.network is None:
        raise UserError(f"the description of {known.device.name} has no network, but the ranks are on several nodes")
    # A container may have fewer cores than the machine, so the affinity of the process counts.
    found = {"memory_bytes": psutil.virtual_memory().total, "cpus": len(os.sched_getaffinity(0))}
    nodes = known.model_copy(
        update={
            "count": max(1, world_size // per_node),
            "devices_per_node": min(per_node, world_size),
            "host": known.host.model_copy(update=found),
        }
    )
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        nodes = nodes.model_copy(update={"device": known.device.model_copy(update={"memory_bytes": memory})})
    return Cluster(name="this machine", nodes=[nodes])


def _described(name: str) -> Nodes:
    """The nodes of a shipped cluster, found by its device's name in ``name``. The longest match counts: "GB200" also
    contains "B200"."""
    known = {nodes.device.name: nodes for path in sorted(CLUSTERS.glob("*.json")) for nodes in load_cluster(path).nodes}
    matching = [device for device in known if device in name]
    if not matching:
        raise UserError(f"device {name!r} is in no description of configs/clusters{nearest(name, known)}")
    return known[max(matching, key=len)]


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one collective.

    Assumption: all devices of a node run the same collective at the same time, each in a group of its own. So they
    share the node's network.

    Attributes:
        size: ranks of the group.
        per_node: ranks of the group joined by the device link: on one node, or on the nodes of one domain.
    """

    size: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes (or domains) of the group."""
        return self.size // self.per_node


def contiguous_group(size: int, nodes: Nodes) -> RankGroup:
    """A group of consecutive ranks."""
    return RankGroup(size, math.gcd(size, nodes.devices_per_domain))


def strided_group(size: int, stride: int, nodes: Nodes) -> RankGroup:
    """A group of ranks r, r + stride, ...; with a stride of ``ep_size`` the ranks with the same experts."""
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
    # Measurements come first: they include the library's choice of algorithm.
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
    """Attained bytes a second of one of ``sharers`` ranks on a shared link."""
    return math.inf if link is None else link.bandwidth_bytes_per_s / sharers * profile.link_efficiency


def latency_of(link: Link | None) -> float:
    """Seconds of the smallest message."""
    return 0.0 if link is None else link.latency_s
