"""Seconds of copies between host and device, and of updates in host memory."""

from __future__ import annotations

from m6.planning.cost.expert_store import ExpertStore
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.profile import Profile

# Bytes that the update of one parameter in host memory reads and writes.
_UPDATE_BYTES = {"AdamW": 48, "Adafactor": 32, "SGD": 40}


class HostTime:
    """Prices what the host of a rank does.

    Args:
        nodes: the rank's node.
        profile: measured rates, or assumed efficiencies.
    """

    def __init__(self, nodes: Nodes, profile: Profile) -> None:
        self.nodes, self.profile = nodes, profile

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes a second between host and device; on a CPU those of its memory."""
        link, measured = self.nodes.links.host, self.profile.host_copy_bytes_per_s
        if measured is not None:
            return measured
        if link is None:
            return device_bandwidth(self.nodes, self.profile)
        return link.bandwidth_bytes_per_s * self.profile.bandwidth_efficiency

    def update_s(self, numel: float, optimizer_type: str) -> float:
        """Seconds of updating ``numel`` parameters while all ranks of a node share its memory and cores."""
        host, ranks = self.nodes.host, self.nodes.devices_per_node
        measured = self.profile.host_update_s_per_parameter.get(optimizer_type)
        if measured is not None:
            return numel * measured * max(1.0, ranks / host.cpus)
        rate = host.memory_bandwidth_bytes_per_s * self.profile.bandwidth_efficiency / ranks
        return numel * _UPDATE_BYTES[optimizer_type] / rate

    def streaming_s(self, numel: int, store: ExpertStore, micro_batches: int, parts: int = 1) -> float:
        """Seconds of the longest of the copies and updates of a step with ``numel`` streamed parameters.

        Each micro-batch copies the weights to the device twice, for the forward and the backward pass, and the
        gradients to the host once for each of the ``parts`` of its tokens. Both directions and the update run beside
        each other.
        """
        once = micro_batches * store.weight_bytes * numel / self.copy_bytes_per_s
        return max(2 * once, parts * once, self.update_s(numel, store.optimizer_type))


def device_bandwidth(nodes: Nodes, profile: Profile) -> float:
    """Bytes a second that a rank reads or writes in the memory of its device."""
    peak = nodes.device.memory_bandwidth_bytes_per_s * profile.bandwidth_efficiency
    return (profile.memory_bandwidth_bytes_per_s or peak) * core_share(nodes)


def core_share(nodes: Nodes) -> float:
    """The share of a core that a rank has: below 1 where more ranks than cores run on a CPU."""
    return 1.0 if nodes.links.host is not None else min(1.0, nodes.host.cpus / nodes.devices_per_node)
