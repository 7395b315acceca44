"""Seconds in which ranks exchange what blocks compute: tokens of experts, and parts of divided matrices."""

from __future__ import annotations

from dataclasses import replace

from m6.config.run import RunConfig
from m6.planning.cost import tensor_time
from m6.planning.cost.compute_time import ComputeTime, sizes_of
from m6.planning.cost.host_time import core_share
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.routing_time import RoutingTime, RoutingTimes
from m6.planning.cost.work import BlockWork
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.profile import Profile


class ExchangeTime:
    """Prices the exchanges of one run's micro-batches on one type of devices.

    Args:
        memory: of the same run; it says what a micro-batch has in it.
        compute: of the same devices, beside which exchanges run.
        collective: seconds of one collective.
    """

    def __init__(
        self,
        config: RunConfig,
        memory: MemoryModel,
        nodes: Nodes,
        profile: Profile,
        compute: ComputeTime,
        collective: tensor_time.Collective,
    ) -> None:
        self._memory, self._nodes, self._profile = memory, nodes, profile
        self._compute, self._collective = compute, collective
        self._model = config.model
        self._moe = None if config.m6.moe is None else config.model.moe_config()
        self._found: dict[tuple[int | bool | str, ...], RoutingTime] = {}
        self._ways: dict[tuple[int | bool | str, ...], int] = {}

    def __call__(self, layout: ParallelLayout) -> float:
        """Seconds of one micro-batch in all layers that computation does not hide."""
        tensor = sum(self._tensor_s(work, layout) * count for work, count in self._compute.work(layout))
        return tensor + self.routing(layout).exposed

    def of_block(self, work: BlockWork, layout: ParallelLayout) -> float:
        """The same of one block."""
        return self._tensor_s(work, layout) + self._routing_of(work, layout).exposed

    def _tensor_s(self, work: BlockWork, layout: ParallelLayout) -> float:
        """Seconds in which a tensor group sums up or gathers what its ranks have of one block."""
        if layout.tp_size == 1 or not work.recomputed:
            return 0.0
        batch, model = self._memory.batch_of(layout), self._model
        tokens, width = batch.rows * batch.sequence_length, self._memory.precision.compute
        sizes = (tokens, model.hidden_size, model.ffn_hidden_size, width)
        seconds = tensor_time.block_s(layout, *sizes, self._nodes, self._collective)
        return seconds * self._profile.factor("exchange")

    def routing(self, layout: ParallelLayout) -> RoutingTime:
        """Seconds in which all layers bring the tokens of a micro-batch to experts on other ranks and back."""
        key = (*sizes_of(layout), layout.ranks_per_node, layout.micro_batches_at_once)
        if key not in self._found:
            alone = (self._routing_of(work, layout) * count for work, count in self._compute.work(layout))
            in_turns = layout.micro_batches_at_once > 1
            self._found[key] = self._in_turns(layout) if in_turns else sum(alone, RoutingTime())
        return self._found[key]

    def _in_turns(self, layout: ParallelLayout) -> RoutingTime:
        """The same for a micro-batch that takes turns with others."""
        blocks = [(work, count) for work, count in self._compute.work(layout) if work.recomputed]
        sparse, count = next((work, count) for work, count in blocks if work.routed is not None)
        assert sparse.routed is not None
        passes, experts = self._compute.passes(sparse, layout), self._compute.block(sparse, layout).experts
        router, at_once = self._router(layout), layout.micro_batches_at_once
        if layout.checkpointing:
            beside = self._compute.block(sparse, layout).compute - experts
            return router.in_turns_of_layers(sparse.routed, experts / passes, beside / passes, count, at_once)
        # Dense blocks between sparse ones are computed beside exchanges, too.
        beside = sum(self._compute.block(work, layout).compute * number for work, number in blocks) / count - experts
        products = ((product, number) for work, number in blocks for product in work.deferred)
        deferred = sum(self._compute.matmul_s(product) * number for product, number in products) / count
        deferred *= self._profile.factor("matmul")
        return router.in_turns(sparse.routed, experts / passes, beside / passes, count, at_once, deferred)

    def _routing_of(self, work: BlockWork, layout: ParallelLayout) -> RoutingTime:
        """The same of one block, for a micro-batch that takes no turns."""
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
        """The layout with the faster exchange of tokens, flat or node first. What the run's JSON says of it is kept."""
        per_node = self._nodes.devices_per_domain
        if self._moe is None or layout.ep_size == 1:
            return layout
        if self._moe.ranks_per_node is not None:
            return replace(layout, ranks_per_node=self._moe.ranks_per_node)
        if layout.ep_size <= per_node or layout.ep_size % per_node:
            return layout
        key = (*sizes_of(layout), layout.micro_batches_at_once)
        if key not in self._ways:
            ways = [replace(layout, ranks_per_node=ranks) for ranks in (0, per_node)]
            self._ways[key] = min(ways, key=self).ranks_per_node
        return replace(layout, ranks_per_node=self._ways[key])
