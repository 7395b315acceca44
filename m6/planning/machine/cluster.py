"""Descriptions of clusters: ``configs/clusters/*.json``.

Rates are peaks from data sheets or published measurements; ``source`` names them. The share of a peak that programs
reach is in :mod:`m6.planning.machine.profile`.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from m6.errors import UserError, nearest
from m6.shipped import CONFIGS, shipped_file
from m6.validation import Section, read_model

CLUSTERS = CONFIGS / "clusters"
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
NonEmptyText = Annotated[str, Field(min_length=1)]


class Device(Section):
    """An accelerator, or the part of a CPU that one rank uses."""

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
    """The CPUs and the host memory that the devices of a node share."""

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
        """Numbers of devices below all of them, most first: of whole nodes, then of one node."""
        nodes = [n for n in range(1, self.count) if self.count % n == 0 or n.bit_count() == 1]
        within = [n for n in range(1, self.devices_per_node) if n.bit_count() == 1]
        return [*within, *(n * self.devices_per_node for n in nodes)][::-1]

    @property
    def devices_per_domain(self) -> int:
        """Devices that the device link joins."""
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
        """Parts that may train a run sooner than all devices do: each choice of types of nodes, and of one type also
        fewer nodes (1, 2, 4, ... and the divisors of their number) and a part of one node (1, 2, 4, ... devices)."""
        found: list[Cluster] = []
        for number in range(1, len(self.nodes) + 1):
            for types in itertools.combinations(self.nodes, number):
                names = " and ".join(node_type.device.name for node_type in types)
                name = self.name if len(types) == len(self.nodes) else f"{self.name}, its {names} alone"
                some = Cluster(name=name, nodes=list(types))
                if some.num_devices < self.num_devices:
                    found.append(some)
                if number == 1:
                    found += map(some.first, types[0].fewer_devices())
        return found

    def scaled(self, num_devices: int) -> Cluster:
        """The first ``num_devices`` of the cluster, or as many in more nodes like its own.

        Raises:
            UserError: ``num_devices`` is not a whole number of nodes, or exceeds a cluster of several types of nodes.
        """
        if num_devices <= self.num_devices or len(self.nodes) > 1:
            return self.first(num_devices)
        return self.resized(num_devices).model_copy(update={"name": f"{self.name}, scaled up"})

    def resized(self, num_devices: int) -> Cluster:
        """A cluster of ``num_devices`` in nodes like the first ones; ``num_devices`` may exceed what the cluster has.
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
        UserError: a missing file, broken JSON, or a key or value that is wrong; the message names it.
    """
    return read_model(Cluster, shipped_file(path, "cluster"))
