"""Seconds of one optimizer step of a layout, by part.

Nothing overlaps, as the shipped configurations run DeepSpeed, with two exceptions. The first is streamed experts with
their transfers and host updates. The second is the exchange of tokens with ``m6.moe.overlap_parts`` or with
interleaved micro-batches.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from m6.architecture.sharing import Sharing
from m6.config.run import RunConfig
from m6.config.shares import shortened
from m6.planning.cost.communication_time import ExchangeTime, ReductionTime, expert_replicas
from m6.planning.cost.compute_time import (
    ComputeTime,
    HostTime,
    LayerTime,
    StepTime,
    Streaming,
    core_share,
    device_bandwidth,
)
from m6.planning.cost.expert_store import uses_of_experts
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.parameter_counts import MuonMatrices, ParameterCounts
from m6.planning.cost.work import Matmul
from m6.planning.machine.cluster import Cluster, Nodes, RankGroup, collective_s, contiguous_group, send_s
from m6.planning.machine.profile import Profile
from m6.training.sizes import FP32, BatchShape

if TYPE_CHECKING:
    from m6.planning.cost.pipeline_time import PipelineTime

MEMORY_FRACTION = 0.9
"""The default usable share of a memory; allocators need the rest."""


def added_bytes(memory: MemoryModel, layout: ParallelLayout, passes: int, place: int) -> float:
    """Bytes read and written by autograd in a step to add up gradients, without the experts of ``m6.offload``.

    At ZeRO stages 0 and 1 the gradients of all micro-batches of a step add up. At stages 2 and 3 only the gradients of
    one backward pass add up: of interleaved micro-batches, of layers with shared weights, of the token table with its
    two uses (embedding and head), and of the parts of the exchange of tokens.

    Args:
        passes: backward passes of the step.
        place: of the rank in the pipeline.
    """
    begun, together = (1, passes) if layout.zero_stage < 2 else (passes, 1)
    each = together * layout.overlap_micro_batches
    used, held, model = memory.used_by_rank(layout, place), memory.counts_of_ranks(layout)[place], memory.config.model
    once = layout.pp_size > 1 or held.frozen  # in a pipeline the table is on two ranks; with adapters it is frozen
    table = 0 if once else model.vocab_size * model.hidden_size
    arriving = each * (used.local + (memory.exchange_parts(layout) - 1) * used.experts + table)
    return 3 * memory.precision.weights * begun * (arriving - held.local) / layout.tp_size


class StoreTime:
    """Prices the store of one run.

    Args:
        memory: of the run; the source of the experts owned by the device.
    """

    def __init__(self, memory: MemoryModel) -> None:
        self._memory = memory
        self._uses = uses_of_experts(memory.model)

    def num_gradients(self, layout: ParallelLayout, passes: int) -> int:
        """Gradients of an expert in ``passes`` backward passes: one of each layer with this expert and each part of
        the exchange. Interleaved micro-batches yield one gradient together."""
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
        """Seconds a step of the device's work on experts: sums of the gradients of interleaved micro-batches, and sums
        and updates of the experts owned by the device."""
        numel, owned = self._numel(layout, place), self._owned_share(layout, place)
        store, gradients = self._memory.expert_store(layout), self.num_gradients(layout, passes)
        summed = gradients * store.summing_bytes(layout.overlap_micro_batches)
        moved = summed + owned * (store.gradient_bytes(gradients, on_device=True) + store.device_update_bytes)
        products = owned * store.update_flops / (host.nodes.device.flops("fp32") * host.profile.matmul_efficiency)
        return numel * (moved / device_bandwidth(host.nodes, host.profile) + products)

    def reduced_bytes(self, layout: ParallelLayout, place: int) -> int:
        """Bytes of the all-reduce between ranks with the same experts, for each of ``num_gradients``."""
        return math.ceil(self._numel(layout, place)) * self._memory.expert_store(layout).weight_bytes

    def _numel(self, layout: ParallelLayout, place: int) -> float:
        """Elements of the experts of a rank."""
        return self._memory.experts_of_ranks(layout)[place] / layout.outer_parts

    def _owned_share(self, layout: ParallelLayout, place: int) -> float:
        return self._memory.owned_share_of_ranks(layout)[place]


# Bytes read and written by the update of one parameter. AdamW reads and writes the weight and two moments, and reads
# the gradient. Adafactor reads the gradient four times, and reads and writes the weight and the update. Muon reads
# gradient and momentum twice, writes both, norms and rounds the update, scales the weight and adds the update. LAMB and
# LARS run unfused operators: LAMB reads or writes 26 numbers, LARS 16.
_UPDATE_BYTES = {"AdamW": 28, "Adafactor": 32, "Muon": 56, "Lamb": 104, "Lars": 64}
# Bytes also moved by ZeRO stages 1 to 3 for each gradient of a rank: into the bucket and out of it, at stages 2 and 3
# for every micro-batch; into the partition, for the norm in fp64 and for the scaling.
_BUCKET_BYTES, _PARTITION_BYTES = 24, 46
# Operators of the fetch, the release and the gradient reduction of one parameter at stage 3.
_STAGE_3_OPERATORS = 15


class TimeModel:
    """Computes the step times of one run's layouts on one cluster.

    Args:
        config: the run.
        cluster: all of its devices compute.
        profile: measured rates, or assumed efficiencies.
        memory: of the same run; it counts parameters and activations.
    """

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        profile: Profile,
        memory: MemoryModel,
    ) -> None:
        self.config, self.cluster, self.profile, self.memory = config, cluster, profile, memory
        self.dtype = config.deepspeed.product_dtype
        self.nodes: Nodes = cluster.slowest(self.dtype)
        self.host = HostTime(self.nodes, profile)
        self.store = StoreTime(memory)
        self.reduction = ReductionTime(config, memory, self.nodes, profile)
        self.compute = ComputeTime(config, memory, self.nodes, profile)
        self.exchange = ExchangeTime(config, memory, self.nodes, profile, self.compute, self._collective)
        self._others: dict[int, TimeModel] = {}

    @functools.cached_property
    def pipeline(self) -> PipelineTime:
        """The time of pipelines."""
        from m6.planning.cost.pipeline_time import PipelineTime  # a run without one does not load it

        sharing = self.config.planned_sharing
        return PipelineTime(
            self.config,
            self.cluster,
            lambda nodes, layout: self._on(nodes).layers(layout),
            self._stage_message_s,
            [1] * self.config.model.num_layers if sharing is None else sharing.group_sizes,
            splits=self.memory.sharing is None,
        )

    def __call__(self, layout: ParallelLayout) -> StepTime:
        steps = layout.accumulation(self.config.deepspeed.train_batch_size)
        if layout.pp_size > 1:
            parts = self.pipeline(layout, steps).parts()
        else:
            types = ((self._on(nodes)._passes(layout), share) for nodes, share in self._shares(layout))
            every = [{name: value * share for name, value in each.items()} for each, share in types]
            parts = max(every, key=lambda each: sum(each.values()))
        if layout.zero_stage == 3:
            # DeepSpeed runs hooks for each parameter, even for small ones.
            parts["launch"] += steps * self.profile.factor("launch") * self._stage_3_launches(layout)
        passes = layout.backward_passes(self.config.deepspeed.train_batch_size)
        ranks = [
            self._on(nodes)._after(layout, passes, place, counts, streaming)
            for place, (nodes, counts, streaming) in enumerate(
                zip(
                    self._slowest_of(layout),
                    self.memory.counts_of_ranks(layout),
                    self._streamings(layout, passes),
                    strict=True,
                )
            )
        ]
        return StepTime(**parts | max(ranks, key=lambda rank: sum(rank.values())))

    def _passes(self, layout: ParallelLayout) -> dict[str, float]:
        """Seconds by part of one micro-batch, without a pipeline."""
        return self.compute(layout).parts() | {"exchange": self.exchange(layout)}

    def _shares(self, layout: ParallelLayout) -> list[tuple[Nodes, int]]:
        """(type of devices, most micro-batches of a rank on it) for the types that may be the last to end."""
        rows = self.config.deepspeed.train_batch_size
        if not layout.shares:
            return [(self.nodes, layout.accumulation(rows))]
        own, found, first = layout.batch_split().shares(rows), list[tuple[Nodes, int]](), 0
        for nodes in self.cluster.nodes:
            end = first + nodes.num_devices
            found.append((nodes, max(own[first // layout.tp_size : -(-end // layout.tp_size)])))
            first = end
        return found

    def balanced(self, layout: ParallelLayout) -> ParallelLayout:
        """A layout without a pipeline, with shares of the batch in proportion to the speeds of its devices.

        The algorithm is Whale's. Shares stay equal where equal ones are best.
        """
        rows, split = self.config.deepspeed.train_batch_size, layout.batch_split()
        if split.ranks % split.neighbours or any(split.refusals(rows)):  # forced sizes need not divide each other
            return layout
        size = split.neighbours * layout.tp_size
        types = self.cluster.nodes
        speeds = [1 / sum(self._on(nodes)._passes(layout).values()) for nodes in types]
        ends = list(itertools.accumulate(nodes.num_devices for nodes in types))

        def speed(group: int) -> float:
            """A group is as slow as its slowest device."""
            first = bisect.bisect_right(ends, group * size)
            return min(speeds[first : bisect.bisect_left(ends, (group + 1) * size) + 1])

        shares = shortened(split.in_proportion(rows, list(map(speed, range(split.groups)))))
        return layout if len(set(shares)) == 1 else replace(layout, shares=shares)

    def _after(
        self, layout: ParallelLayout, passes: int, place: int, counts: ParameterCounts, streaming: Streaming
    ) -> dict[str, float]:
        """Seconds by part of a rank with ``counts`` after the passes of a step, with its waits for streamed experts."""
        update, host = self._update(layout, passes, counts)
        update += added_bytes(self.memory, layout, passes, place) / device_bandwidth(self.nodes, self.profile)
        if layout.stream_experts:
            update += self.store.device_s(layout, passes, place, self.host)
        return {
            "reduction": self.profile.factor("reduction") * self._reduction(layout, passes, place, counts),
            "update": self.profile.factor("update") * update,
            "host": self.profile.factor("host") * (host + streaming.exposed),
        }

    def _slowest_of(self, layout: ParallelLayout) -> list[Nodes]:
        """Place in the pipeline -> its slowest devices."""
        return [self.nodes] * layout.pp_size if len(self.cluster.nodes) == 1 else self.pipeline.slowest_of(layout)

    def _on(self, nodes: Nodes) -> TimeModel:
        """The model of a rank on devices of one type."""
        if nodes is self.nodes:
            return self
        number = self.cluster.nodes.index(nodes)  # types may differ in their links alone
        if number not in self._others:
            alone = self.cluster.model_copy(update={"nodes": [nodes]})
            self._others[number] = TimeModel(self.config, alone, self.profile, self.memory)
        return self._others[number]

    def _stage_3_launches(self, layout: ParallelLayout) -> float:
        """Seconds a micro-batch of launches at stage 3: two fetches and one gradient reduction of every parameter."""
        tensors = sum(number for _, number in self.memory.counts(layout).sizes)
        return 3 * tensors * _STAGE_3_OPERATORS * self.profile.kernel_s / core_share(self.nodes)

    def layer_s(self, layout: ParallelLayout) -> list[float]:
        """Seconds of computing one micro-batch: of the embeddings, of each layer, and of the head with the loss."""
        return [layer.parts.compute for layer in self.layers(layout)]

    def layers(self, layout: ParallelLayout) -> list[LayerTime]:
        """The times of the embeddings, of each layer, and of the head with the loss."""
        model = self.memory.model
        types = [block.type for block, count, _ in model.blocks if count]
        times = {
            block_type: LayerTime(
                replace(self.compute.block(work, layout), exchange=self.exchange.of_block(work, layout)),
                self.compute.passes(work, layout),
            )
            for block_type, (work, _) in zip(types, self.compute.work(layout), strict=True)
        }
        layers = range(model.config.num_layers)
        between = [times["sparse" if model.config.is_moe_layer(layer) else "dense"] for layer in layers]
        return [times["embeddings"], *between, times["norm"]]

    def lower_bound(self, layout: ParallelLayout) -> float:
        """A lower bound of the seconds of a step: its matrix products at the device's peak FLOP/s. In a pipeline it is
        an equal share of all passes."""
        if layout.pp_size > 1:
            return self.pipeline.least(layout, layout.accumulation(self.config.deepspeed.train_batch_size))
        most = layout.accumulation(self.config.deepspeed.train_batch_size)
        return max(self._on(nodes)._products_s(layout) * share / most for nodes, share in self._shares(layout))

    def _products_s(self, layout: ParallelLayout) -> float:
        """The least seconds of the matrix products of the rank with most micro-batches."""
        peak = max(self.nodes.device.matmul_flops.values())
        return self.compute.flops(layout) / peak * self._fastest_factor()

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of a device in the run's data type."""
        return self.nodes.device.flops(self.dtype)

    def _fastest_factor(self) -> float:
        """A factor to keep the bound below prices: fitted factors and measured rates may beat the described peak."""
        factor = min(1.0, self.profile.factor("matmul"), self.profile.factor("experts"))
        measured = max((point.flops for point in self.profile.matmul), default=0.0)
        return factor * min(1.0, max(self.nodes.device.matmul_flops.values()) / max(measured, 1.0))

    def _stage_message_s(self, layout: ParallelLayout) -> float:
        """Seconds of a micro-batch's residual stream, or its gradient, between two neighbouring ranks of a pipeline."""
        batch = self.memory.batch_of(layout)
        numel = batch.rows * batch.sequence_length * self.config.model.hidden_size
        numel //= layout.tp_size if layout.sequence_parallel else 1
        seconds = send_s(numel * self.memory.precision.residual, self.cluster, self.nodes, self.profile)
        return seconds * self.profile.factor("exchange")

    def _collective(self, kind: Literal["all_reduce", "all_gather"], num_bytes: float, group: RankGroup) -> float:
        return collective_s(kind, num_bytes, group, self.nodes, self.profile) / core_share(self.nodes)

    def _reduction(self, layout: ParallelLayout, passes: int, place: int, counts: ParameterCounts) -> float:
        """Seconds of a step for the sums of gradients and the gathering of weights."""
        seconds = self.reduction(layout, passes, counts)
        if layout.stream_experts:
            replicas = expert_replicas(layout, self.nodes)
            each = self._collective("all_reduce", self.store.reduced_bytes(layout, place), replicas)
            seconds += self.store.num_gradients(layout, passes) * each
        return seconds

    def _update(self, layout: ParallelLayout, passes: int, counts: ParameterCounts) -> tuple[float, float]:
        """Seconds of the update on the device, and of transfers and updates in host memory."""
        counts = counts.divided(layout)
        stage, width = layout.zero_stage, self.memory.precision.weights
        owned, owned_experts = float(counts.local - counts.experts), float(counts.experts)
        if stage > 0:
            owned /= layout.dp_size
            owned_experts /= layout.expert_copies
        owned += owned_experts
        # Stage 1 fills the bucket once a step, stages 2 and 3 in each backward pass.
        moved = _PARTITION_BYTES + _BUCKET_BYTES * (passes if stage > 1 else 1) if stage > 0 else 0
        copies = moved * counts.local / device_bandwidth(self.nodes, self.profile)
        by_muon = counts.muon if self.config.deepspeed.optimizer_type == "Muon" else ()
        products = muon_products_s(by_muon, layout, self.dtype, self.compute.matmul_s)
        if layout.tp_size > 1:
            # ZeRO stages 1 and 2 divide the matrices, which tensor groups gather, over replicas.
            whole = sum(part.numel * part.parts for part in by_muon if part.parts > 1)
            gathered = whole / (layout.dp_size if stage > 0 else 1) * FP32
            products += self._collective("all_gather", gathered, contiguous_group(layout.tp_size, self.nodes))
        if not layout.offload_optimizer:
            optimizer = self.config.deepspeed.optimizer_type
            measured = self.profile.update_s_per_parameter.get(optimizer)
            each = (
                _UPDATE_BYTES[optimizer] / device_bandwidth(self.nodes, self.profile)
                if measured is None
                else measured / core_share(self.nodes)
            )
            return owned * each + products + copies, 0.0
        down = owned * (4 if passes == 1 else 2 * passes + 4)
        up = owned * (width if passes == 1 else width + 2 * passes)
        if layout.offload_params:
            up += owned * 4 * passes
        update = self.host.update_s(owned, self.config.deepspeed.optimizer_type)
        copies += products  # the device also computes the products of partitions in host memory
        return copies, (down + up) / self.host.copy_bytes_per_s + update

    def _streamings(self, layout: ParallelLayout, passes: int) -> list[Streaming]:
        """The copies and updates of streamed experts in a step, on each rank of a pipeline."""
        if not layout.stream_experts:
            return [Streaming()] * layout.pp_size
        if layout.pp_size > 1:
            windows = [(rank.compute, rank.exchange) for rank in self.pipeline.ranks(layout)]
        else:
            windows = [(self.compute(layout).compute, self.exchange(layout))]
        forwards, at_once, found = 4 if layout.checkpointing else 3, layout.overlap_micro_batches, []
        for place, (computing, exchange) in enumerate(windows):
            forward = computing / forwards + exchange / (forwards - 1)
            seconds = at_once * forward, at_once * (computing + exchange - forward)
            host = self._on(self._slowest_of(layout)[place]).host
            found.append(self.store.streaming(layout, passes, place, host, *seconds))
        return found

    def hidden_s(self, layout: ParallelLayout) -> float:
        """Seconds a step of overlapped work: exchanges of tokens, and copies and updates of streamed experts."""
        steps = layout.accumulation(self.config.deepspeed.train_batch_size)
        hidden = self.exchange.routing(layout).hidden * steps / layout.pp_size
        if layout.stream_experts:
            passes = layout.backward_passes(self.config.deepspeed.train_batch_size)
            slowest = max(self._streamings(layout, passes), key=lambda streaming: streaming.exposed)
            hidden += slowest.hidden * self.profile.factor("host")
        return hidden


def muon_products_s(
    matrices: Iterable[MuonMatrices], layout: ParallelLayout, dtype: str, matmul_s: Callable[[Matmul], float]
) -> float:
    """Seconds of the products of a step. ZeRO stages 1 and 2 divide them over ranks together with the partitions.

    They belong to the update: its measured factor includes them.
    """
    seconds = 0.0
    for part in matrices:
        replicas = layout.expert_copies if part.of_experts else layout.dp_size
        share = part.number / (replicas if layout.zero_stage > 0 else 1)
        seconds += share * sum(matmul_s(product) for product in part.products(dtype))
    return seconds


def cost_models(
    config: RunConfig,
    cluster: Cluster,
    profile: Profile,
    batch: BatchShape | None = None,
    sharing: Sharing | None = None,
    memory_fraction: float = MEMORY_FRACTION,
) -> tuple[MemoryModel, TimeModel]:
    """The models of the memory and the time of one run on one cluster.

    Args:
        batch: the shape of a micro-batch of the run's data; None: rows without padding.
        sharing: what the layers share in the Pseudo phase; None: nothing.
        memory_fraction: the usable share of each memory.
    """
    on_cpu = cluster.smallest.links.host is None
    device_bytes = None  # for the store of m6.offload; a CPU has host memory alone
    if not on_cpu:
        usable, store = cluster.smallest.device.memory_bytes * memory_fraction, config.expert_store
        if store is not None and not isinstance(store.device_budget_mib, str):
            usable = min(usable, store.device_budget_mib * 2**20)
        device_bytes = int(usable)
    memory = MemoryModel(config, profile, batch, sharing, on_cpu, device_bytes)
    return memory, TimeModel(config, cluster, profile, memory)
