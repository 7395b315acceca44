"""Descriptions of machines: ``configs/clusters/*.json``.

Rates are peaks of data sheets or figures that somebody measured; ``source`` says which. What a program attains of
them is a matter of :mod:`m6.planning.profile`.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from m6.errors import UserError, nearest
from m6.validation import Section, parse_json, validate

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
Tokens = Annotated[str, Field(min_length=1)]


class Device(Section):
    """An accelerator, or a share of a CPU."""

    name: Tokens = Field(description="as the driver calls it, or a part of that")
    memory_bytes: PositiveInt = Field(description="memory of the device")
    matmul_flops: dict[str, PositiveFloat] = Field(description="peak FLOP/s of dense matrix products, by data type")
    memory_bandwidth_bytes_per_s: PositiveFloat = Field(description="peak of reading or writing device memory")
    source: Tokens = Field(description="where the figures come from")

    @model_validator(mode="after")
    def _check_types(self) -> Device:
        for name in self.matmul_flops:
            if name not in DTYPES:
                raise ValueError(f"matmul_flops: unknown data type {name!r}{nearest(name, DTYPES)}")
        if "fp32" not in self.matmul_flops:
            raise ValueError('matmul_flops: "fp32" is missing; every device computes in it')
        return self

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in ``dtype``; a type without matrix units of its own runs at the rate of fp32."""
        return self.matmul_flops.get(dtype, self.matmul_flops["fp32"])


class Link(Section):
    """A way that bytes take, in one direction."""

    bandwidth_bytes_per_s: PositiveFloat = Field(description="peak, one direction")
    latency_s: float = Field(ge=0, description="seconds of the smallest message")
    source: Tokens = Field(description="where the figures come from")


class Links(Section):
    """The three tiers of a node."""

    device: Link | None = Field(None, description="between devices of a node, of one device; none: a device alone")
    network: Link | None = Field(None, description="between nodes, of a whole node, shared by its devices")
    host: Link | None = Field(None, description="between host memory and one device; none: they are the same memory")


class Host(Section):
    """What the devices of a node share."""

    cpus: PositiveInt = Field(description="cores of the node")
    memory_bytes: PositiveInt = Field(description="memory of the node's CPUs")
    memory_bandwidth_bytes_per_s: PositiveFloat = Field(description="peak of reading or writing it, whole node")
    source: Tokens = Field(description="where the figures come from")


class Nodes(Section):
    """Nodes of one kind."""

    count: PositiveInt = Field(description="how many of them")
    devices_per_node: PositiveInt = Field(description="ranks that run on one")
    device: Device
    host: Host
    links: Links

    @property
    def num_devices(self) -> int:
        return self.count * self.devices_per_node


class Cluster(Section):
    """Nodes of one or more kinds, joined by a network."""

    name: Tokens = Field(description="how reports call it")
    nodes: list[Nodes] = Field(min_length=1, description="kinds of nodes")

    @model_validator(mode="after")
    def _check_links(self) -> Cluster:
        total = sum(kind.count for kind in self.nodes)
        for index, kind in enumerate(self.nodes):
            if kind.devices_per_node > 1 and kind.links.device is None:
                raise ValueError(f"nodes.{index}.links.device: missing, but a node has {kind.devices_per_node} devices")
            if total > 1 and kind.links.network is None:
                raise ValueError(f"nodes.{index}.links.network: missing, but there are {total} nodes")
        return self

    @property
    def num_devices(self) -> int:
        return sum(kind.num_devices for kind in self.nodes)

    @property
    def is_mixed(self) -> bool:
        return len({kind.device.name for kind in self.nodes}) > 1

    @cached_property
    def smallest(self) -> Nodes:
        """The kind with the least device memory, by which a layout that treats all ranks alike must fit."""
        return min(self.nodes, key=lambda kind: kind.device.memory_bytes)

    def slowest(self, dtype: str) -> Nodes:
        """The kind for which the others wait when all ranks get the same work."""
        return min(self.nodes, key=lambda kind: kind.device.flops(dtype))

    def first(self, num_devices: int) -> Cluster:
        """The cluster cut to ``num_devices``: whole nodes in the order of the file, or a part of one node.

        Raises:
            UserError: the cluster has fewer devices, or the number ends inside a node.
        """
        if not 1 <= num_devices <= self.num_devices:
            raise UserError(f"{num_devices} devices: {self.name} has {self.num_devices}")
        kinds: list[Nodes] = []
        left = num_devices
        for kind in self.nodes:
            if left == 0:
                break
            if not kinds and left < kind.devices_per_node:
                kinds.append(kind.model_copy(update={"count": 1, "devices_per_node": left}))
                left = 0
                break
            count = min(kind.count, left // kind.devices_per_node)
            if count:
                kinds.append(kind.model_copy(update={"count": count}))
                left -= count * kind.devices_per_node
        if left:
            sizes = sorted({kind.devices_per_node for kind in self.nodes})
            raise UserError(
                f"{num_devices} devices: {self.name} has nodes of {', '.join(map(str, sizes))}; take whole nodes"
            )
        return Cluster(name=self.name, nodes=kinds)

    def resized(self, num_devices: int) -> Cluster:
        """A cluster of the first kind of nodes with ``num_devices``, which may be more than there are."""
        kind = self.nodes[0]
        per_node = min(kind.devices_per_node, num_devices)
        if num_devices % per_node:
            raise UserError(f"{num_devices} devices are no whole number of nodes of {per_node}")
        update = {"count": num_devices // per_node, "devices_per_node": per_node}
        return Cluster(name=self.name, nodes=[kind.model_copy(update=update)])


def load_cluster(path: Path) -> Cluster:
    """Reads a cluster's JSON; a bare name is one of the shipped ones.

    Raises:
        UserError: a missing file, broken JSON, or a key or value that is wrong; the message names it.
    """
    if not path.exists() and path.suffix == "" and len(path.parts) == 1:
        shipped = {file.stem: file for file in CLUSTERS.glob("*.json")}
        if path.name not in shipped:
            raise UserError(f"{path}: no such file, and no shipped cluster{nearest(path.name, shipped)}")
        path = shipped[path.name]
    try:
        return validate(Cluster, parse_json(path.read_text(encoding="utf-8")), "")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None
