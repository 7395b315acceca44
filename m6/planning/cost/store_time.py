"""Seconds of the experts of ``m6.offload`` in a step: streamed through a device, or owned by it."""

from __future__ import annotations

import math

from m6.planning.cost.expert_store import uses_of_experts
from m6.planning.cost.host_time import HostTime, Streaming, device_bandwidth
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel


class StoreTime:
    """Prices the store of one run.

    Args:
        memory: of the run; it says what the device owns.
    """

    def __init__(self, memory: MemoryModel) -> None:
        self._memory = memory
        self._uses = uses_of_experts(memory.model)

    def num_gradients(self, layout: ParallelLayout, steps: int) -> int:
        """Gradients of an expert in ``steps`` micro-batches: one of each layer that uses it and each part of the
        exchange."""
        return round(steps * self._memory.exchange_parts(layout) * self._uses)

    def streaming(
        self, layout: ParallelLayout, steps: int, place: int, host: HostTime, forward_s: float, backward_s: float
    ) -> Streaming:
        """The copies and updates of streamed experts in a step.

        Args:
            steps: micro-batches of the step.
            place: of the rank in the pipeline.
            host: of the rank.
            forward_s: seconds of the forward pass of a micro-batch.
            backward_s: the same of the backward pass, with recomputation.
        """
        numel = math.ceil((1 - self._owned_share(layout, place)) * self._numel(layout, place))
        store, gradients = self._memory.expert_store(layout), self.num_gradients(layout, steps)
        return host.streaming(numel, store, steps, gradients, self._uses, forward_s, backward_s)

    def owned_s(self, layout: ParallelLayout, steps: int, place: int, host: HostTime) -> float:
        """Seconds of a step in which a device adds up the gradients of experts that it owns, and updates them."""
        numel = self._owned_share(layout, place) * self._numel(layout, place)
        store = self._memory.expert_store(layout)
        moved = store.gradient_bytes(self.num_gradients(layout, steps), on_device=True) + store.device_update_bytes
        return numel * moved / device_bandwidth(host.nodes, host.profile)

    def reduced_bytes(self, layout: ParallelLayout, place: int) -> int:
        """The bytes that ranks with the same experts sum up for each of ``num_gradients``."""
        return math.ceil(self._numel(layout, place)) * self._memory.expert_store(layout).weight_bytes

    def _numel(self, layout: ParallelLayout, place: int) -> float:
        """Elements of the experts of a rank."""
        return self._memory.experts_of_ranks(layout)[place] / layout.tp_size

    def _owned_share(self, layout: ParallelLayout, place: int) -> float:
        return self._memory.owned_share_of_ranks(layout)[place]
