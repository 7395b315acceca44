"""Seconds in which a step sums gradients over ranks and gathers weights."""

from __future__ import annotations

from typing import Literal

from m6.config.communication import CommunicationSettings
from m6.config.run import RunConfig
from m6.planning.cost.gradient_bytes import is_compressed, messages
from m6.planning.cost.host_time import core_share, device_bandwidth
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.parameter_counts import ParameterCounts
from m6.planning.cost.precision import FP32
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.collectives import RankGroup, collective_s, strided_group
from m6.planning.machine.profile import Profile

# Bytes that choosing, copying and keeping move in device memory for each compressed element, by the operators of
# m6/training/reduction: at least, because the k largest elements are found in several passes. Not measured on a GPU.
_MOVED_BYTES = {"top_k": 48, "chunks": 64, "powersgd": 56}


class ReductionTime:
    """Prices what DeepSpeed's parameters take; experts of ``m6.offload`` are not among them."""

    def __init__(self, config: RunConfig, memory: MemoryModel, nodes: Nodes, profile: Profile) -> None:
        self._settings, self._memory, self._nodes, self._profile = config.m6.communication, memory, nodes, profile

    def __call__(self, layout: ParallelLayout, passes: int, counts: ParameterCounts | None = None) -> float:
        """Seconds of a step. Stages 0 and 1 reduce once a step, 2 and 3 for every micro-batch (DeepSpeed 0.19.8).

        Args:
            counts: of the rank; None: of the fullest one.
        """
        counts = (counts or self._memory.counts(layout)).divided(layout)
        stage, width = layout.zero_stage, self._memory.precision.weights
        everyone, replicas = all_replicas(layout, self._nodes), expert_replicas(layout, self._nodes)
        parts = ((counts.local - counts.experts, everyone), (counts.experts, replicas))
        if stage == 3:
            # Weights are gathered for the forward and for the backward pass; a reduce-scatter costs as much.
            return sum(3 * passes * self._collective("all_gather", numel * width, group) for numel, group in parts)
        seconds = self.gradients(layout, passes, self._settings, counts)
        seconds += self._summed(counts.experts, replicas, stage, passes)
        if stage > 0:
            seconds += sum(self._collective("all_gather", numel * width, group) for numel, group in parts)
        return seconds

    def gradients(
        self,
        layout: ParallelLayout,
        passes: int,
        settings: CommunicationSettings,
        counts: ParameterCounts | None = None,
    ) -> float:
        """Seconds of a step for gradients that all ranks have, after the warm-up of the density; not at stage 3.

        Args:
            counts: of the rank, divided by tensor parallelism; None: of the fullest one.
        """
        everyone = all_replicas(layout, self._nodes)
        if not settings.compresses:
            counts = counts or self._memory.counts(layout).divided(layout)
            return self._summed(counts.local - counts.experts, everyone, layout.zero_stage, passes)
        ranks, tensors = layout.dp_size, self._memory.shared_gradients(layout)
        found = messages(tensors, settings, settings.density_of(settings.warmup_steps), ranks)
        moved = sum(tensor.numel for tensor in tensors if is_compressed(tensor, settings))
        # An all-gather's output is the contributions of all ranks together.
        sent = self._collective("all_reduce", found.all_reduced, everyone)
        sent += self._collective("all_gather", found.gathered * ranks, everyone)
        copies = moved * _MOVED_BYTES[settings.gradients] / device_bandwidth(self._nodes, self._profile)
        return (sent + copies) / layout.tp_size

    def _summed(self, numel: int, group: RankGroup, stage: int, passes: int) -> float:
        # A bucket has partitions of several ranks, so that stages 1 and 2 all-reduce it, too.
        width = FP32 if stage == 0 else self._memory.precision.weights
        return (passes if stage == 2 else 1) * self._collective("all_reduce", numel * width, group)

    def _collective(self, kind: Literal["all_reduce", "all_gather"], num_bytes: float, group: RankGroup) -> float:
        return collective_s(kind, num_bytes, group, self._nodes, self._profile) / core_share(self._nodes)


def all_replicas(layout: ParallelLayout, nodes: Nodes) -> RankGroup:
    """The ranks that have the same dense parameters."""
    return strided_group(layout.dp_size, layout.tp_size, nodes)


def expert_replicas(layout: ParallelLayout, nodes: Nodes) -> RankGroup:
    """The ranks that have the same experts."""
    return strided_group(layout.dp_size // layout.ep_size, layout.ep_size * layout.tp_size, nodes)
