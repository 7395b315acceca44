"""Seconds of copies between host and device, and of updates in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from m6.planning.cost.expert_store import ExpertStore
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.profile import Profile

# Bytes that DeepSpeed's update of one parameter in host memory reads and writes.
_DEEPSPEED_UPDATE_BYTES = 48
# Seconds of one core for the update of one float16 parameter in the store, the slower of the 16-bit types: within the
# spread of scripts/benchmarks/results/offload_host_optimizer.md on an Intel Xeon; SGD is not in it.
_STORE_UPDATE_S = {"AdamW": 3.6e-9, "Adafactor": 5.7e-9, "SGD": 5.4e-9}


@dataclass(frozen=True)
class Streaming:
    """Seconds a step in which streamed experts are copied and updated.

    Attributes:
        exposed: in which computation waits for that.
        hidden: in which computation and exchanges run beside it.
    """

    exposed: float = 0.0
    hidden: float = 0.0


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
        """Seconds in which DeepSpeed updates ``numel`` parameters of each rank of a node in its memory."""
        measured = self.profile.host_update_s_per_parameter.get(optimizer_type)
        if measured is not None:
            return numel * measured * max(1.0, self.nodes.devices_per_node / self.nodes.host.cpus)
        return numel * _DEEPSPEED_UPDATE_BYTES / self._memory_rate

    def store_update_s(self, numel: float, store: ExpertStore) -> float:
        """Seconds in which the threads of the store update ``numel`` parameters of each rank."""
        ranks, name = self.nodes.devices_per_node, store.optimizer_type
        threads = min(store.num_threads, self.nodes.host.cpus / ranks)
        # The profile measures PyTorch's optimizers in fp32, which DeepSpeed runs on the host; the store has its own.
        return max(numel * _STORE_UPDATE_S[name] / threads, numel * store.update_bytes / self._memory_rate)

    @property
    def _memory_rate(self) -> float:
        """A rank's share of the bytes a second of the host's memory."""
        rate = self.nodes.host.memory_bandwidth_bytes_per_s * self.profile.bandwidth_efficiency
        return rate / self.nodes.devices_per_node

    def streaming(
        self,
        numel: int,
        store: ExpertStore,
        backward_passes: int,
        num_gradients: int,
        uses: float,
        forward_s: float,
        backward_s: float,
    ) -> Streaming:
        """Prices a step with ``numel`` streamed parameters.

        The first forward pass runs beside the update and the copies of the weights, other forward passes beside copies
        of the weights, and backward passes beside copies of the weights and, in the other direction, of gradients,
        which the host adds up. Each takes as long as the link to the device or the host's memory, whichever is slower.
        A late update runs beside all of them.

        Args:
            num_gradients: of a parameter in the step.
            uses: layers that compute with the same experts.
            forward_s: seconds of a forward pass.
            backward_s: seconds of a backward pass, with recomputation.
        """
        weights, update = uses * store.weight_bytes * numel, self.store_update_s(numel, store)
        copied = num_gradients * store.weight_bytes * numel / backward_passes
        added = store.gradient_bytes(num_gradients, on_device=False) * numel / backward_passes
        link, memory = 1 / self.copy_bytes_per_s, 1 / self._memory_rate
        forward = weights * max(link, memory)
        backward = max(weights * link, copied * link, (weights + added) * memory)
        passes = [(forward, forward_s)] * backward_passes + [(backward, backward_s)] * backward_passes
        if store.next_weights is None:
            # The update reads and writes the memory from which the weights are copied.
            passes[0] = max(weights * link, update, (store.update_bytes * numel + weights) * memory), forward_s
        exposed = sum(max(0.0, busy - window) for busy, window in passes)
        copying = sum(busy for busy, _ in passes)
        if store.next_weights is None:
            return Streaming(exposed, copying - exposed)
        step = sum(window for _, window in passes) + exposed
        late = max(0.0, update - step)
        return Streaming(exposed + late, copying - exposed + update - late)


def device_bandwidth(nodes: Nodes, profile: Profile) -> float:
    """Bytes a second that a rank reads or writes in the memory of its device."""
    peak = nodes.device.memory_bandwidth_bytes_per_s * profile.bandwidth_efficiency
    return (profile.memory_bandwidth_bytes_per_s or peak) * core_share(nodes)


def core_share(nodes: Nodes) -> float:
    """The share of a core that a rank has: below 1 where more ranks than cores run on a CPU."""
    return 1.0 if nodes.links.host is not None else min(1.0, nodes.host.cpus / nodes.devices_per_node)
