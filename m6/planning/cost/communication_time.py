"""Seconds of communication: exchange of tokens, tensor parallelism, reduction of gradients, gathering of weights.

The collectives of tensor parallelism follow ``m6/model/placements``, whose tests count them. A part of the exchange of
tokens may overlap with computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from m6.architecture.communication_volume import side
from m6.config.communication import CommunicationSettings
from m6.config.run import RunConfig
from m6.planning.cost.compute_time import ComputeTime, core_share, device_bandwidth, sizes_of
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.parameter_counts import ParameterCounts
from m6.planning.cost.work import BlockWork, RoutedRows
from m6.planning.machine.cluster import (
    Nodes,
    RankGroup,
    collective_s,
    contiguous_group,
    latency_of,
    rate,
    strided_group,
)
from m6.planning.machine.profile import Profile
from m6.training.reduction.messages import is_compressed, messages
from m6.training.sizes import FP32
from moe import MoEConfig
from moe.exchange_traffic import StepTraffic, exchange_traffic
from moe.overlap_simulator import interleaved_span, span

Collective = Callable[[Literal["all_reduce", "all_gather"], float, RankGroup], float]
"""(kind, bytes, group) -> seconds. Bytes are the input of a rank, or the output of an all-gather. A reduce-scatter
takes as long as an all-gather."""


def tensor_block_s(
    layout: ParallelLayout,
    tokens: int,
    hidden: int,
    inner: int,
    width: int,
    nodes: Nodes,
    collective: Collective,
    num_shared: int | None = None,
) -> float:
    """Seconds of one block for one micro-batch, forward and backward, and forward again with checkpointing.

    Args:
        tokens: of the micro-batch.
        hidden, inner: sizes of the feed-forward.
        width: bytes of an element.
        num_shared: shared experts of a sparse block; None: the block is dense.
    """
    group = contiguous_group(layout.tp_size, nodes)
    passes = 3 if layout.checkpointing else 2
    # Attention, and a feed-forward in 1-D: a sum of outputs forward, and of the inputs' gradients backward.
    reduced = passes * collective("all_reduce", tokens * hidden * width, group)
    again = 0.0
    if layout.sequence_parallel:
        # The input of attention or a dense feed-forward again in the backward pass, and whole tokens around experts.
        one = collective("all_gather", tokens * hidden * width, group)
        again = 2 * one if num_shared is None else (1 + passes) * one
    if num_shared is not None and layout.placement != "megatron":
        # Each rank has a part of the tokens' outputs, and backward of their gradients.
        gathered = passes * collective("all_gather", tokens * hidden * width, group)
        return reduced + gathered + again + (reduced if num_shared else 0.0)
    if layout.placement == "1d" or layout.placement == "megatron":
        return 2 * reduced + again
    # The whole hidden states around the feed-forward: gathered outputs forward, gathered gradients backward, and the
    # gradients of both biases.
    around = passes * collective("all_gather", tokens * hidden * width, group)
    around += collective("all_reduce", inner * width, group) + collective("all_reduce", hidden * width, group)
    q = side(layout.placement, layout.tp_size)
    assert q is not None
    row, matrix = tokens * width, hidden * inner * width
    forward_passes = passes - 1
    if layout.placement == "2d":
        # Of each product both operands are gathered, again in the backward pass, where both gradients are summed up.
        operands = collective("all_gather", row * (hidden + inner) / q, strided_group(q, 1, nodes))
        operands += 2 * collective("all_gather", matrix / q, strided_group(q, q, nodes))
        return reduced + around + (forward_passes + 2) * operands
    # The same on a cube, and results are summed up forward and gathered backward. The input of one product lies along
    # the same axis as the result of the other.
    operands = results = 0.0
    for inputs, outputs, along_inputs, along_outputs in ((hidden, inner, q, 1), (inner, hidden, 1, q)):
        operands += collective("all_gather", row * inputs / q**2, strided_group(q, along_inputs, nodes))
        operands += collective("all_gather", matrix / q**2, strided_group(q, q * q, nodes))
        results += collective("all_gather", row * outputs / q**2, strided_group(q, along_outputs, nodes))
    return reduced + around + (forward_passes + 2) * operands + (forward_passes + 1) * results


# A lower bound of the bytes moved in device memory per compressed element, by the operators of m6/training/reduction:
# selection, copies, residuals. The k largest elements are found in several passes. Not measured on a GPU.
_MOVED_BYTES = {"top_k": 48, "chunks": 64, "powersgd": 56}


class ReductionTime:
    """Prices the reduction of DeepSpeed's parameters, without the experts of ``m6.offload``."""

    def __init__(self, config: RunConfig, memory: MemoryModel, nodes: Nodes, profile: Profile) -> None:
        self._settings, self._memory, self._nodes, self._profile = config.m6.communication, memory, nodes, profile
        self._has_tree = config.m6.training.deterministic is not None

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
        seconds += self._summed(counts.experts, replicas, layout, passes)
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
        """Seconds of a step for gradients common to all ranks, after the warm-up of the density; not at stage 3.

        Args:
            counts: of the rank, divided by tensor parallelism; None: of the fullest one.
        """
        everyone = all_replicas(layout, self._nodes)
        if not settings.compresses:
            counts = counts or self._memory.counts(layout).divided(layout)
            return self._summed(counts.local - counts.experts, everyone, layout, passes)
        ranks, tensors = layout.dp_size, self._memory.shared_gradients(layout)
        found = messages(tensors, settings, settings.density_of(settings.warmup_steps), ranks)
        moved = sum(tensor.numel for tensor in tensors if is_compressed(tensor, settings))
        # The output of an all-gather has the contributions of all ranks.
        sent = self._collective("all_reduce", found.all_reduced, everyone)
        sent += self._collective("all_gather", found.gathered * ranks, everyone)
        copies = moved * _MOVED_BYTES[settings.gradients] / device_bandwidth(self._nodes, self._profile)
        return (sent + copies) / layout.tp_size

    def _summed(self, numel: int, group: RankGroup, layout: ParallelLayout, passes: int) -> float:
        stage = layout.zero_stage
        width = FP32 if stage == 0 else self._memory.precision.weights
        # DeepSpeed's buckets have partitions of several ranks, so stages 1 and 2 all-reduce them, too. Pipelines
        # reduce-scatter, except for compressed gradients and trees.
        scatters = stage == 1 and layout.pp_size > 1 and not self._settings.compresses and not self._has_tree
        kind: Literal["all_reduce", "all_gather"] = "all_gather" if scatters else "all_reduce"
        return (passes if stage == 2 else 1) * self._collective(kind, numel * width, group)

    def _collective(self, kind: Literal["all_reduce", "all_gather"], num_bytes: float, group: RankGroup) -> float:
        return collective_s(kind, num_bytes, group, self._nodes, self._profile) / core_share(self._nodes)


def all_replicas(layout: ParallelLayout, nodes: Nodes) -> RankGroup:
    """The group of ranks with the same dense parameters."""
    return strided_group(layout.dp_size, layout.tp_size, nodes)


def expert_replicas(layout: ParallelLayout, nodes: Nodes) -> RankGroup:
    """The group of ranks with the same experts."""
    copies = layout.expert_copies
    return strided_group(copies, layout.world_size // (layout.pp_size * copies), nodes)


# Libraries start the messages to all peers together. Assumption: each further message adds a tenth of the latency.
_MESSAGE = 0.1


@dataclass(frozen=True)
class RoutingTime:
    """Seconds of the exchanges of tokens.

    Attributes:
        exposed: computation waits for them.
        hidden: overlapped with computation.
    """

    exposed: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: RoutingTime) -> RoutingTime:
        return RoutingTime(self.exposed + other.exposed, self.hidden + other.hidden)

    def __mul__(self, times: float) -> RoutingTime:
        return RoutingTime(self.exposed * times, self.hidden * times)


class _Hops(NamedTuple):
    """Seconds of a layer's exchanges.

    Attributes:
        numbers: of the token counts.
        there: of the dispatch of rows, hop by hop.
        back: of the combine, hop by hop.
        links: of each hop of the dispatch: 1 through the network, 0 inside of a node.
    """

    numbers: float
    there: list[float]
    back: list[float]
    links: list[int]


class RoutingTimes:
    """Prices the exchanges of layers with the settings ``moe`` in groups of ``ep_size`` ranks.

    Args:
        factor: multiplies the seconds of exchanges: the profile's, divided by a rank's share of a core.
    """

    def __init__(self, moe: MoEConfig, ep_size: int, nodes: Nodes, profile: Profile, factor: float) -> None:
        self.moe, self.ep_size, self.nodes, self.profile, self.factor = moe, ep_size, nodes, profile, factor

    def __call__(self, routed: RoutedRows, experts: float, shared: float, passes: int) -> RoutingTime:
        """Seconds of one layer and micro-batch.

        Args:
            experts: seconds of the experts in a forward pass. A backward pass takes twice as long.
            shared: the same of the shared experts.
            passes: the cost of all passes in forward passes, see ``TimeModel``.
        """
        forward, backward = (self._pass(routed, experts, shared, backward) for backward in (False, True))
        return forward * (passes - 2) + backward

    def interleaved_s(
        self,
        routed: RoutedRows,
        experts: float,
        concurrent: float,
        num_layers: int,
        at_once: int,
        deferred: float = 0.0,
    ) -> RoutingTime:
        """Seconds of one micro-batch in all layers, forward and backward, if ``at_once`` micro-batches are interleaved.

        Args:
            experts: as above.
            concurrent: seconds of all other computation of a layer in a forward pass. A backward pass takes twice as
                long.
            deferred: seconds of the deferrable gradients of weights. They are a part of ``concurrent`` in the backward
                pass.
        """
        forward = self._interleaved_pass_s(routed, experts, concurrent, num_layers, at_once, False)
        return forward + self._interleaved_pass_s(routed, experts, concurrent, num_layers, at_once, True, deferred)

    def interleaved_layers_s(
        self, routed: RoutedRows, experts: float, concurrent: float, num_layers: int, at_once: int
    ) -> RoutingTime:
        """The same with activation checkpointing: micro-batches overlap within each layer only, and forward passes run
        twice."""
        forward, backward = (
            self._interleaved_pass_s(routed, experts, concurrent, 1, at_once, is_backward)
            for is_backward in (False, True)
        )
        return (forward * 2 + backward) * num_layers

    def _interleaved_pass_s(
        self,
        routed: RoutedRows,
        experts: float,
        concurrent: float,
        num_layers: int,
        at_once: int,
        backward: bool,
        deferred: float = 0.0,
    ) -> RoutingTime:
        hops, times = self._hops(routed, backward, parts=1), 2 if backward else 1
        numbers = num_layers * hops.numbers
        if self.nodes.links.host is None:
            return RoutingTime(numbers + num_layers * (sum(hops.there) + sum(hops.back)))
        seconds = (hops.there, times * experts, hops.back, at_once, num_layers, times * concurrent)
        found = interleaved_span(*seconds, backward, hops.links, deferred)
        return RoutingTime(numbers + found.exposed / at_once, found.hidden / at_once)

    def _pass(self, routed: RoutedRows, experts: float, shared: float, backward: bool) -> RoutingTime:
        parts, once = self.moe.overlap_parts, (2 if backward else 1) / self.moe.overlap_parts
        hops = self._hops(routed, backward, parts)
        if self.nodes.links.host is None:  # a CPU: its cores also run the exchanges
            return RoutingTime(hops.numbers + parts * (sum(hops.there) + sum(hops.back)))
        found = span(hops.there, once * experts, hops.back, parts, once * shared, backward, hops.links)
        return RoutingTime(hops.numbers + found.exposed, found.hidden)

    def _hops(self, routed: RoutedRows, backward: bool, parts: int) -> _Hops:
        """Seconds of the exchange of one of ``parts`` parts, and of the token counts of all parts."""
        steps = exchange_traffic(
            self.moe, self.ep_size, routed.tokens, routed.pairs, self.nodes.devices_per_domain, backward
        )
        numbers = sum(self._seconds(step, step.number_bytes, 0 if backward else parts) for step in steps)
        back = [self._seconds(step, step.rows * routed.from_experts, parts) / parts for step in reversed(steps)]
        there = [
            self._seconds(
                step,
                step.rows * routed.to_experts + step.other_bytes - step.number_bytes,
                step.collectives - (1 if backward else 2) * parts,
            )
            / parts
            for step in steps
        ]
        return _Hops(numbers, there, back, [int(step.near_peers < step.peers) for step in steps])

    def _seconds(self, step: StepTraffic, num_bytes: float, collectives: int) -> float:
        """Seconds of a share of a step. Assumption: traffic in the node and traffic out of it do not overlap."""
        crosses = step.near_peers < step.peers
        measured = self.profile.collective_line("all_to_all", "network" if crosses else "device", step.peers + 1)
        if measured is not None:
            latency, per_byte = measured
            # The measured sizes include the rank's own part, which is not sent.
            return self.factor * (collectives * latency + num_bytes * (1 + 1 / step.peers) * per_byte)
        links, near = self.nodes.links, num_bytes * step.near_peers / step.peers
        inside = rate(links.device, 1, self.profile)
        between = rate(links.network, self.nodes.devices_per_node, self.profile)
        latency = latency_of(links.network if crosses else links.device)
        messages = collectives * latency * (1 + _MESSAGE * step.peers)
        return self.factor * (messages + near / inside + (num_bytes - near) / between)


class ExchangeTime:
    """Prices the exchanges of one run's micro-batches on one type of devices.

    Args:
        memory: of the same run; the source of the micro-batch's sizes.
        compute: of the same devices. Exchanges overlap with it.
        collective: seconds of one collective.
    """

    def __init__(
        self,
        config: RunConfig,
        memory: MemoryModel,
        nodes: Nodes,
        profile: Profile,
        compute: ComputeTime,
        collective: Collective,
    ) -> None:
        self._memory, self._nodes, self._profile = memory, nodes, profile
        self._compute, self._collective = compute, collective
        self._model = config.model
        self._moe = None if config.m6.moe is None else config.model.moe_config()
        self._found: dict[tuple[int | bool | str, ...], RoutingTime] = {}
        self._ways: dict[tuple[int | bool | str, ...], int] = {}

    def __call__(self, layout: ParallelLayout) -> float:
        """Exposed seconds of one micro-batch in all layers."""
        tensor = sum(self._tensor_s(work, layout) * count for work, count in self._compute.work(layout))
        return tensor + self.routing(layout).exposed

    def of_block(self, work: BlockWork, layout: ParallelLayout) -> float:
        """The same of one block."""
        return self._tensor_s(work, layout) + self._routing_of(work, layout).exposed

    def _tensor_s(self, work: BlockWork, layout: ParallelLayout) -> float:
        """Seconds of the collectives of a tensor group in one block."""
        if layout.tp_size == 1:
            return 0.0
        if not work.recomputed:  # embeddings forward, or gradients of the head's inputs backward
            seconds = self._collective("all_reduce", work.reduced_bytes, contiguous_group(layout.tp_size, self._nodes))
            return seconds * self._profile.factor("exchange")
        batch, model = self._memory.batch_of(layout), self._model
        tokens, width = batch.rows * batch.sequence_length, self._memory.precision.compute
        sizes = (tokens, model.hidden_size, model.ffn_hidden_size, width)
        num_shared = self._moe.num_shared_experts if self._moe is not None and work.is_sparse else None
        seconds = tensor_block_s(layout, *sizes, self._nodes, self._collective, num_shared)
        return seconds * self._profile.factor("exchange")

    def routing(self, layout: ParallelLayout) -> RoutingTime:
        """Seconds of dispatch and combine of a micro-batch in all layers."""
        key = (*sizes_of(layout), layout.ranks_per_node, layout.overlap_micro_batches)
        if key not in self._found:
            alone = (self._routing_of(work, layout) * count for work, count in self._compute.work(layout))
            is_interleaved = layout.overlap_micro_batches > 1
            self._found[key] = self._interleaved(layout) if is_interleaved else sum(alone, RoutingTime())
        return self._found[key]

    def _interleaved(self, layout: ParallelLayout) -> RoutingTime:
        """The same if several micro-batches are interleaved."""
        blocks = [(work, count) for work, count in self._compute.work(layout) if work.recomputed]
        sparse, count = next((work, count) for work, count in blocks if work.routed is not None)
        assert sparse.routed is not None
        passes, experts = self._compute.passes(sparse, layout), self._compute.block(sparse, layout).experts
        router, at_once = self._router(layout), layout.overlap_micro_batches
        if layout.checkpointing:
            concurrent = self._compute.block(sparse, layout).compute - experts
            return router.interleaved_layers_s(sparse.routed, experts / passes, concurrent / passes, count, at_once)
        # The computation of dense blocks between sparse ones overlaps with exchanges, too.
        concurrent = (
            sum(self._compute.block(work, layout).compute * number for work, number in blocks) / count - experts
        )
        products = ((product, number) for work, number in blocks for product in work.deferred)
        deferred = sum(self._compute.matmul_s(product) * number for product, number in products) / count
        deferred *= self._profile.factor("matmul")
        return router.interleaved_s(sparse.routed, experts / passes, concurrent / passes, count, at_once, deferred)

    def _routing_of(self, work: BlockWork, layout: ParallelLayout) -> RoutingTime:
        """The same of one block, without interleaving."""
        if work.routed is None:
            return RoutingTime()
        passes = self._compute.passes(work, layout)
        shared = sum(self._compute.matmul_s(product) for product in work.shared) * self._profile.factor("matmul")
        return self._router(layout)(work.routed, self._compute.block(work, layout).experts / passes, shared, passes)

    def _router(self, layout: ParallelLayout) -> RoutingTimes:
        assert self._moe is not None
        moe = replace(self._moe, ranks_per_node=layout.ranks_per_node or None)
        factor = self._profile.factor("exchange") / core_share(self._nodes)
        return RoutingTimes(moe, layout.ep_size, self._nodes, self._profile, factor)

    def faster(self, layout: ParallelLayout) -> ParallelLayout:
        """The layout with the faster exchange of tokens, flat or node first. A choice in the run's JSON is kept."""
        per_node = self._nodes.devices_per_domain
        if self._moe is None or layout.ep_size == 1:
            return layout
        if self._moe.ranks_per_node is not None:
            return replace(layout, ranks_per_node=self._moe.ranks_per_node)
        if layout.ep_size <= per_node or layout.ep_size % per_node or self._moe.num_experts % layout.ep_size:
            return layout  # a forced ep_size need not divide the experts
        key = (*sizes_of(layout), layout.overlap_micro_batches)
        if key not in self._ways:
            ways = [replace(layout, ranks_per_node=ranks) for ranks in (0, per_node)]
            self._ways[key] = min(ways, key=self).ranks_per_node
        return replace(layout, ranks_per_node=self._ways[key])
