"""The cluster that this process runs on."""

from __future__ import annotations

import os

import psutil
import torch

from m6.errors import UserError, nearest
from m6.planning.machine.cluster import CLUSTERS, Cluster, Nodes, load_cluster
from m6.runs.environment import ranks_per_node


def detect_cluster(world_size: int) -> Cluster:
    """A cluster of nodes like this one, for ``world_size`` ranks.

    Memory and cores are measured. Rates come from the shipped description of the device. The launcher says in the
    environment how many ranks share a node.

    Raises:
        UserError: no shipped description has this device, or it has no network and the ranks span several nodes.
    """
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
    """The nodes of the shipped cluster whose device's name is part of ``name``: of several, such as B200 and GB200, the
    longest."""
    known = {nodes.device.name: nodes for path in sorted(CLUSTERS.glob("*.json")) for nodes in load_cluster(path).nodes}
    matching = [device for device in known if device in name]
    if not matching:
        raise UserError(f"device {name!r} is in no description of configs/clusters{nearest(name, known)}")
    return known[max(matching, key=len)]
