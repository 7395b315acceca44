"""Seconds of one rank by itself: a micro-batch on the device, copies from and to the host, updates on the host."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields

from m6.config.run import RunConfig
from m6.planning.cost.expert_store import ExpertStore
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.work import BlockWork, Matmul, work_of
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.profile import Profile


@dataclass(frozen=True)
class StepTime:
    """Seconds of the slowest rank.

    Attributes:
        matmul: matrix products, except those of experts.
        experts: grouped matrix products of experts.
        elementwise: all other operators, limited by memory bandwidth.
        launch: the least time of each operator.
        exchange: exposed dispatch and combine of tokens; collectives of tensor parallelism.
        reduction: all-reduce of gradients and all-gather of weights.
        update: the optimizer on the device.
        host: exposed transfers between host and device, and the exposed update on the host.
        bubble: waits of a pipeline for other stages and for messages from them.
    """

    matmul: float = 0.0
    experts: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    exchange: float = 0.0
    reduction: float = 0.0
    update: float = 0.0
    host: float = 0.0
    bubble: float = 0.0

    @functools.cached_property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def compute(self) -> float:
        """Seconds of all operators of forward and backward passes."""
        return self.matmul + self.experts + self.elementwise + self.launch

    def parts(self) -> dict[str, float]:
        """The seconds by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def sum_of(cls, times: Iterable[StepTime]) -> StepTime:
        """The sum, part by part."""
        each = list(times)
        return cls(*(sum(getattr(time, field.name) for time in each) for field in fields(cls)))


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one micro-batch in one layer, in the embeddings, or in the head.

    Attributes:
        parts: of all passes.
        passes: their cost in forward passes: a backward pass costs two, recomputation one more.
    """

    parts: StepTime
    passes: int

    @functools.cached_property  # a search reads those of the same few layers for every stage of every cut
    def total(self) -> float:
        """Seconds of all passes."""
        return self.parts.compute + self.parts.exchange

    @functools.cached_property
    def forward(self) -> float:
        """Seconds of the forward pass. Tokens go to experts and back once in each pass, backward and again forward."""
        return self.parts.compute / self.passes + self.parts.exchange / (self.passes - 1)

    @functools.cached_property
    def weight(self) -> float:
        """Seconds of the gradients of weights, as far as they can be deferred. Experts compute theirs together with
        the gradients of the inputs."""
        return self.parts.matmul / self.passes


# Bytes read and written in host memory by DeepSpeed's update of one parameter.
_DEEPSPEED_UPDATE_BYTES = 48
# Seconds of one core for the update of one float16 parameter in the store. float16 is the slower of the 16-bit types.
# The values lie within the spread of scripts/benchmarks/results/offload_host_optimizer.md on an Intel Xeon. That page
# does not have SGD.
_STORE_UPDATE_S = {"AdamW": 3.6e-9, "Adafactor": 5.7e-9, "SGD": 5.4e-9, "Muon": 5.4e-9}
# FLOP/s of a core for Muon's products in fp32. A loaded core of an AMD EPYC with AVX-512 reached 66 to 72 GFLOP/s.
_STORE_FLOPS = 6e10


@dataclass(frozen=True)
class Streaming:
    """Seconds a step of the copies and updates of streamed experts.

    Attributes:
        exposed: computation waits for them.
        hidden: overlapped with computation and exchanges.
    """

    exposed: float = 0.0
    hidden: float = 0.0


class HostTime:
    """Prices copies and updates on the host of a rank.

    Args:
        nodes: the rank's node.
        profile: measured rates, or assumed efficiencies.
    """

    def __init__(self, nodes: Nodes, profile: Profile) -> None:
        self.nodes, self.profile = nodes, profile

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes a second between host and device; on a CPU its memory bandwidth."""
        link, measured = self.nodes.links.host, self.profile.host_copy_bytes_per_s
        if measured is not None:
            return measured
        if link is None:
            return device_bandwidth(self.nodes, self.profile)
        return link.bandwidth_bytes_per_s * self.profile.bandwidth_efficiency

    def update_s(self, numel: float, optimizer_type: str) -> float:
        """Seconds of DeepSpeed's update of ``numel`` parameters of each rank of a node, in host memory."""
        measured = self.profile.host_update_s_per_parameter.get(optimizer_type)
        if measured is not None:
            return numel * measured * max(1.0, self.nodes.devices_per_node / self.nodes.host.cpus)
        return numel * _DEEPSPEED_UPDATE_BYTES / self._memory_rate

    def store_update_s(self, numel: float, store: ExpertStore) -> float:
        """Seconds of the update of ``numel`` parameters of each rank by the threads of the store."""
        ranks, name = self.nodes.devices_per_node, store.optimizer_type
        threads = min(store.num_threads, self.nodes.host.cpus / ranks)
        # The profile measures PyTorch's optimizers in fp32. DeepSpeed runs these on the host; the store has its own.
        products = numel * store.update_flops / (threads * _STORE_FLOPS)
        return products + max(numel * _STORE_UPDATE_S[name] / threads, numel * store.update_bytes / self._memory_rate)

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

        The first forward pass overlaps with the update and the copies of the weights. Other forward passes overlap with
        copies of the weights. Backward passes overlap with copies of the weights and, in the other direction, of
        gradients; the host adds these up. Each copy takes as long as the link to the device or the host's memory,
        whichever is slower. A delayed update overlaps with all passes.

        Args:
            num_gradients: of a parameter in the step.
            uses: layers with the same experts.
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
    """A rank's memory bandwidth on its device, in bytes a second."""
    peak = nodes.device.memory_bandwidth_bytes_per_s * profile.bandwidth_efficiency
    return (profile.memory_bandwidth_bytes_per_s or peak) * core_share(nodes)


def core_share(nodes: Nodes) -> float:
    """A rank's share of a core: below 1 where more ranks than cores run on a CPU."""
    return 1.0 if nodes.links.host is not None else min(1.0, nodes.host.cpus / nodes.devices_per_node)


_FORWARD_PASSES, _BACKWARD_PASSES = 2, 3  # reads and writes of the saved bytes
Sizes = tuple[int, int, int, bool, str, bool]


def sizes_of(layout: ParallelLayout) -> Sizes:
    """The cache key of the time of a micro-batch without communication."""
    groups = layout.tp_size, layout.checkpointing, layout.placement, layout.sequence_parallel
    return layout.micro_batch_size, layout.ep_size, *groups


class ComputeTime:
    """Prices the products, elementwise operators and launches of a run's blocks on one type of devices.

    Args:
        memory: of the same run; the source of the micro-batch's sizes.
    """

    def __init__(self, config: RunConfig, memory: MemoryModel, nodes: Nodes, profile: Profile) -> None:
        self.config, self.memory, self.nodes, self.profile = config, memory, nodes, profile
        self._works: dict[tuple[int | str, ...], list[tuple[BlockWork, int]]] = {}
        self._wholes: dict[Sizes, StepTime] = {}

    def __call__(self, layout: ParallelLayout) -> StepTime:
        """Seconds of one micro-batch in all layers."""
        key = sizes_of(layout)
        if key not in self._wholes:
            blocks = [(self.block(work, layout), count) for work, count in self.work(layout)]
            names = ("matmul", "experts", "elementwise", "launch")
            self._wholes[key] = StepTime(
                *(sum(getattr(each, name) * count for each, count in blocks) for name in names)
            )
        return self._wholes[key]

    def work(self, layout: ParallelLayout) -> list[tuple[BlockWork, int]]:
        """The distinct blocks, and how often each is computed."""
        # The search visits thousands of layouts with the same sizes.
        key = (layout.micro_batch_size, layout.ep_size, layout.tp_size, layout.placement, layout.sequence_parallel)
        if key not in self._works:
            batch = self.memory.batch_of(layout)
            self._works[key] = work_of(self.config, self.memory.model, batch, layout)
        return self._works[key]

    def passes(self, work: BlockWork, layout: ParallelLayout) -> int:
        """The cost of a micro-batch in forward passes; a backward pass costs two."""
        return 4 if layout.checkpointing and work.recomputed else 3

    def block(self, work: BlockWork, layout: ParallelLayout) -> StepTime:
        """Seconds of one micro-batch in one block."""
        passes = self.passes(work, layout)
        matmul = experts = 0.0
        for product in work.matmuls:
            seconds = passes * self.matmul_s(product)
            if product.grouped:
                experts += seconds
            else:
                matmul += seconds
        # Elementwise operators write and read the tensors saved for the backward pass. Their time follows these bytes.
        saved = work.whole_bytes + (work.saved_bytes - work.whole_bytes) / layout.tp_size
        moved = saved * (_FORWARD_PASSES * (passes - 2) + _BACKWARD_PASSES)
        elementwise = moved / device_bandwidth(self.nodes, self.profile)
        launch = passes * work.operators * self.profile.kernel_s / core_share(self.nodes)
        factor = self.profile.factor
        return StepTime(
            matmul * factor("matmul"),
            experts * factor("experts"),
            elementwise * factor("elementwise"),
            launch * factor("launch"),
        )

    def matmul_s(self, product: Matmul) -> float:
        """Seconds of a product.

        With measured rates: the FLOPs at the measured rate, or the transfer of the operands if it takes longer. Without
        them: the root of the sum of squares of three times. These are the FLOPs at the assumed rate, the transfer, and
        the launches if every expert has its own. The result is between the longest of the three and their sum. On an
        H100 it deviates by 18 % (16 bits) and 28 % (fp32) from the measured times of grouped products
        (scripts/benchmarks/results/gpu_products.md).
        """
        m, n, k, count = product.m, product.n, product.k, product.count
        share, device = core_share(self.nodes), self.nodes.device
        transfer = product.moved_bytes / device_bandwidth(self.nodes, self.profile)
        measured = self.profile.measured_flops(m, n, k, product.dtype, count if product.grouped else 1)
        if measured is not None:
            return max(product.flops / (measured * share), transfer)
        computing = product.flops / (device.flops(product.dtype) * self.profile.matmul_efficiency * share)
        launches = count if product.grouped and product.dtype not in device.grouped_dtypes else 0
        return math.hypot(computing, transfer, launches * self.profile.kernel_s / share)

    def flops(self, layout: ParallelLayout) -> float:
        """FLOPs of a rank's matrix products in a step, recomputation included."""
        passes = [self.passes(work, layout) for work, _ in self.work(layout)]
        products = (work.flops * count for work, count in self.work(layout))
        return self._micro_batches(layout) * sum(map(operator.mul, products, passes))

    def model_flops(self, layout: ParallelLayout) -> float:
        """The FLOPs of a step that count as work of the model.

        Recomputation does not count. Experts count with the expected number of (token, expert) pairs. It is lower than
        that of evenly chosen experts, for which steps are priced.
        """
        routing, share = self.memory.expected_routing(layout), 1.0
        if routing is not None:
            batch = self.memory.batch_of(layout)
            share = routing.experts_per_token * batch.real / max(1, self.memory.activations_of(layout).rows())
        products = (
            product.flops * count * (share if product.grouped else 1.0)
            for work, count in self.work(layout)
            for product in work.matmuls
        )
        return 3 * self._micro_batches(layout) * sum(products)

    def _micro_batches(self, layout: ParallelLayout) -> float:
        """Micro-batches of a rank in a step, divided by the ranks of its pipeline."""
        return layout.accumulation(self.config.deepspeed.train_batch_size) / layout.pp_size
