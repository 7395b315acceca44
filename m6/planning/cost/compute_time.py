"""Seconds in which a rank computes a micro-batch, without communication."""

from __future__ import annotations

import math
import operator

from m6.config.run import RunConfig
from m6.planning.cost.host_time import core_share, device_bandwidth
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.step_parts import StepTime
from m6.planning.cost.work import BlockWork, Matmul, work_of
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.profile import Profile

_FORWARD_PASSES, _BACKWARD_PASSES = 2, 3  # reads and writes of the saved bytes
Sizes = tuple[int, int, int, bool, str]


def sizes_of(layout: ParallelLayout) -> Sizes:
    """What the time of a micro-batch without communication depends on."""
    return layout.micro_batch_size, layout.ep_size, layout.tp_size, layout.checkpointing, layout.placement


class ComputeTime:
    """Prices the products, elementwise operators and launches of a run's blocks on one type of devices.

    Args:
        memory: of the same run; it says what a micro-batch has in it.
    """

    def __init__(self, config: RunConfig, memory: MemoryModel, nodes: Nodes, profile: Profile) -> None:
        self.config, self.memory, self.nodes, self.profile = config, memory, nodes, profile
        self._works: dict[tuple[int, int, int, str], list[tuple[BlockWork, int]]] = {}
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
        # The search visits thousands of layouts that share these sizes.
        key = (layout.micro_batch_size, layout.ep_size, layout.tp_size, layout.placement)
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
        # Elementwise operators write and read what is saved for the backward pass, so its bytes give their time.
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

        Where rates were measured, they decide, or the transfer of the operands if that takes longer. Elsewhere it is
        the root of the sum of squares of the FLOPs at the assumed rate, of that transfer, and of the launches if every
        expert has its own: more than the longest of the three, less than all, one after the other. On an H100 this is
        18 % (16 bits) and 28 % (fp32) from the measured times of grouped products
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
        """FLOPs of a rank's matrix products in a step, with those of recomputation."""
        passes = [self.passes(work, layout) for work, _ in self.work(layout)]
        products = (work.flops * count for work, count in self.work(layout))
        return self._micro_batches(layout) * sum(map(operator.mul, products, passes))

    def model_flops(self, layout: ParallelLayout) -> float:
        """The FLOPs of them that the model needs: without recomputation, and of the pairs that experts are expected to
        compute, which are fewer than those of evenly chosen experts that a step is priced with."""
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
        """Of a rank in a step, over the ranks that share their layers."""
        return layout.accumulation(self.config.deepspeed.train_batch_size) / layout.pp_size
