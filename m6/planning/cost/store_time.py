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

    def num_gradients(self, layout: ParallelLayout, passes: int) -> int:
        """Gradients of an expert in ``passes`` backward passes: one of each layer that uses it and each part of the
        exchange; those of micro-batches that take turns are one."""
        return round(passes * self._memory.exchange_parts(layout) * self._uses)

    def streaming(
        self, layout: ParallelLayout, passes: int, place: int, host: HostTime, forward_s: float, backward_s: float
    ) -> Streaming:
        """The copies and updates of streamed experts in a step.

        Args:
            passes: backward passes of the step.
            place: of the rank in the pipeline.
            host: of the rank.
            forward_s: seconds of a forward pass.
            backward_s: the same of the backward pass, with recomputation.
        """
        numel = math.ceil((1 - self._owned_share(layout, place)) * self._numel(layout, place))
        store, gradients = self._memory.expert_store(layout), self.num_gradients(layout, passes)
        return host.streaming(numel, store, passes, gradients, self._uses, forward_s, backward_s)

    def device_s(self, layout: ParallelLayout, passes: int, place: int, host: HostTime) -> float:
        """Seconds of a step in which a device adds up the gradients of micro-batches that take turns, and those of
        experts that it owns, which it also updates."""
        numel, owned = self._numel(layout, place), self._owned_share(layout, place)
        store, gradients = self._memory.expert_store(layout), self.num_gradients(layout, passes)
        summed = gradients * store.summing_bytes(layout.micro_batches_at_once)
        moved = summed + owned * (store.gradient_bytes(gradients, on_device=True) + store.device_update_bytes)
        return numel * moved / device_bandwidth(host.nodes, host.profile)

    def reduced_bytes(self, layout: ParallelLayout, place: int) -> int:
        """The bytes that ranks with the same experts sum up for each of ``num_gradients``."""
        return math.ceil(self._numel(layout, place)) * self._memory.expert_store(layout).weight_bytes

    def _numel(self, layout: ParallelLayout, place: int) -> float:
        """Elements of the experts of a rank."""
        return self._memory.experts_of_ranks(layout)[place] / layout.tp_size

    def _owned_share(self, layout: ParallelLayout, place: int) -> float:
        return self._memory.owned_share_of_ranks(layout)[place]
