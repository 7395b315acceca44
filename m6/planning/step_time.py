"""Seconds of one optimizer step of a layout, per part.

Nothing is taken to overlap, which is how the shipped configurations run DeepSpeed; streamed experts alone are priced
as their design has it: transfers and the host's update behind the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from m6.config.run import RunConfig
from m6.planning.cluster import Cluster, Nodes
from m6.planning.collectives import Group, collective_s, neighbours, send_s, strided
from m6.planning.footprint import MemoryModel
from m6.planning.layout import Layout
from m6.planning.partition import balanced_share
from m6.planning.profile import CollectiveKind, Profile
from m6.planning.work import BlockWork, Matmul, compute_dtype, work_of

# Bytes that the update of one parameter reads and writes: AdamW weight, moments r+w and gradient r; Adafactor the
# gradient four times, the weight and the update.
_UPDATE_BYTES = {"AdamW": 28, "Adafactor": 32}
_HOST_UPDATE_BYTES = {"AdamW": 48, "Adafactor": 32}
# What DeepSpeed's ZeRO stages 1 to 3 move beside that for each parameter of which a rank computes gradients: into the
# bucket and out of it, for every micro-batch above stage 1; to the partition, for the norm in fp64 and the scaling.
_BUCKET_BYTES, _PARTITION_BYTES = 24, 46
# Calls around the fetch, the release and the reduction of one parameter at stage 3.
_STAGE_3_OPERATORS = 15
_FORWARD_PASSES, _BACKWARD_PASSES = 2, 3  # reads and writes of what is saved


@dataclass(frozen=True)
class StepTime:
    """Seconds of the slowest rank."""

    matmul: float = 0.0
    experts: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    exchange: float = 0.0
    """all-to-all to the experts and back, and the all-reduces of tensor parallelism"""
    reduction: float = 0.0
    """of gradients, and the gathering of weights"""
    update: float = 0.0
    host: float = 0.0
    """transfers to host memory and back and the update there, as far as they are not hidden"""
    bubble: float = 0.0
    """stages of a pipeline that wait"""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def compute(self) -> float:
        return self.matmul + self.experts + self.elementwise + self.launch

    def parts(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class TimeModel:
    """Step times of one run's layouts on one cluster.

    Args:
        stage_share: of the layers' seconds, how much falls to the slowest of so many pipeline stages.
    """

    def __init__(
        self,
        config: RunConfig,
        cluster: Cluster,
        profile: Profile,
        memory: MemoryModel,
        stage_share: Callable[[Sequence[float], int], float] = balanced_share,
    ) -> None:
        self.config, self.cluster, self.profile, self.memory = config, cluster, profile, memory
        self._stage_share = stage_share
        self.dtype = compute_dtype(config)
        self.nodes: Nodes = cluster.slowest(self.dtype)
        self._works: dict[tuple[int, int, int], list[tuple[BlockWork, int]]] = {}
        self._computes: dict[tuple[int, int, int, bool], StepTime] = {}

    def __call__(self, layout: Layout) -> StepTime:
        steps = layout.accumulation(self.config.deepspeed.train_batch_size)
        once, exchange = self._compute(layout), self._exchange(layout)
        stages = layout.pp_size
        parts = {name: value * steps / stages for name, value in once.parts().items()}
        parts["exchange"] += steps * exchange / stages
        if layout.zero_stage == 3:
            parts["launch"] += steps * self.profile.factor("launch") * self._stage_3_launches(layout)
        parts["reduction"] = self.profile.factor("reduction") * self._reduction(layout, steps)
        parts["update"], host = self._update(layout, steps, parts["matmul"] + parts["experts"])
        parts["update"] *= self.profile.factor("update")
        parts["host"] = self.profile.factor("host") * host
        if stages > 1:
            # 1F1B: the last stage begins after stages - 1 micro-batches and ends as many before the first.
            slowest = self._stage_share(self.layer_s(layout), stages) * (once.compute + exchange)
            parts["bubble"] = (steps + stages - 1) * slowest - steps * (once.compute + exchange) / stages
        return StepTime(**parts)

    def _stage_3_launches(self, layout: Layout) -> float:
        """Of one micro-batch, in which every parameter is fetched twice and its gradient reduced."""
        tensors = sum(number for _, number in self.memory.counts(layout).sizes)
        return 3 * tensors * _STAGE_3_OPERATORS * self.profile.kernel_s / self._share()

    def layer_s(self, layout: Layout) -> list[float]:
        """Seconds of computing one micro-batch: of the embeddings, of every layer, and of the head with its loss."""
        model = self.memory.model
        kinds = [block.kind for block, count, _ in model.blocks if count]
        seconds = {
            kind: self._block(work, layout).compute for kind, (work, _) in zip(kinds, self._work(layout), strict=True)
        }
        layers = range(model.config.num_layers)
        between = [seconds["sparse" if model.config.is_moe_layer(layer) else "dense"] for layer in layers]
        return [seconds["embeddings"], *between, seconds["norm"]]

    def lower_bound(self, layout: Layout) -> float:
        """Seconds that no efficiency can beat: the products alone at the device's peak."""
        steps = layout.accumulation(self.config.deepspeed.train_batch_size)
        flops = sum(work.flops * self._passes(work, layout) * count for work, count in self._work(layout))
        return steps * flops / layout.pp_size / max(self.nodes.device.matmul_flops.values()) * self._fastest_factor()

    def _fastest_factor(self) -> float:
        """Fitted factors may say that a machine is faster than its description, and tables may, too."""
        factor = min(1.0, self.profile.factor("matmul"), self.profile.factor("experts"))
        measured = max((point.flops for point in self.profile.matmul), default=0.0)
        return factor * min(1.0, max(self.nodes.device.matmul_flops.values()) / max(measured, 1.0))

    def _work(self, layout: Layout) -> list[tuple[BlockWork, int]]:
        key = (layout.micro_batch_size, layout.ep_size, layout.tp_size)
        if key not in self._works:
            batch = self.memory.batch_of(layout)
            self._works[key] = work_of(self.config, self.memory.model, batch, layout.ep_size, layout.tp_size)
        return self._works[key]

    def _passes(self, work: BlockWork, layout: Layout) -> int:
        """Forward passes that a micro-batch costs; the backward pass is two of them."""
        return 4 if layout.checkpointing and work.recomputed else 3

    def _compute(self, layout: Layout) -> StepTime:
        """Of one micro-batch, over all layers, without what ranks tell each other."""
        key = (layout.micro_batch_size, layout.ep_size, layout.tp_size, layout.checkpointing)
        if key not in self._computes:
            self._computes[key] = self._compute_anew(layout)
        return self._computes[key]

    def _compute_anew(self, layout: Layout) -> StepTime:
        blocks = [(self._block(work, layout), count) for work, count in self._work(layout)]
        names = ("matmul", "experts", "elementwise", "launch")
        return StepTime(*(sum(getattr(block, name) * count for block, count in blocks) for name in names))

    def _block(self, work: BlockWork, layout: Layout) -> StepTime:
        """Of one micro-batch in one block."""
        passes = self._passes(work, layout)
        matmul = experts = 0.0
        for product in work.matmuls:
            seconds = passes * self._matmul_s(product)
            if product.grouped:
                experts += seconds
            else:
                matmul += seconds
        moved = work.saved_bytes * (_FORWARD_PASSES * (passes - 2) + _BACKWARD_PASSES)
        elementwise = moved / layout.tp_size / self._memory_bandwidth()
        launch = passes * work.operators * self.profile.kernel_s / self._share()
        factor = self.profile.factor
        return StepTime(
            matmul * factor("matmul"),
            experts * factor("experts"),
            elementwise * factor("elementwise"),
            launch * factor("launch"),
        )

    def _share(self) -> float:
        """Of a core, where more ranks than cores run on a CPU."""
        if self.nodes.links.host is not None:
            return 1.0
        return min(1.0, self.nodes.host.cpus / self.nodes.devices_per_node)

    def _memory_bandwidth(self) -> float:
        measured = self.profile.memory_bandwidth_bytes_per_s
        peak = self.nodes.device.memory_bandwidth_bytes_per_s * self.profile.bandwidth_efficiency
        return (measured or peak) * self._share()

    def _matmul_s(self, product: Matmul) -> float:
        """The slower of computing at the attained rate and of moving the operands."""
        m, n, k, count = product.m, product.n, product.k, product.count
        peak = self.nodes.device.flops(product.dtype)
        rate = self.profile.attained_flops(peak, m, n, k, product.dtype, count if product.grouped else 1)
        width = 4 if product.dtype in ("fp32", "tf32") else 2
        moved = (m * k + k * n + m * n) * width * count
        return max(product.flops / (rate * self._share()), moved / self._memory_bandwidth())

    def _exchange(self, layout: Layout) -> float:
        """Of one micro-batch, over all layers."""
        experts, tensor = neighbours(layout.ep_size, self.nodes), neighbours(layout.tp_size, self.nodes)
        seconds = 0.0
        for work, count in self._work(layout):
            again = 3 if layout.checkpointing and work.recomputed else 2  # forward, backward, recomputation
            each = sum(self._collective("all_to_all", num_bytes, experts) for num_bytes in work.exchange_bytes)
            if layout.tp_size > 1 and work.recomputed:
                batch = self.memory.batch_of(layout)
                rows = batch.rows * batch.sequence_length * self.config.model.hidden_size
                each += 2 * self._collective("all_reduce", rows * self.memory.precision.compute, tensor)
            seconds += count * again * each
        if layout.pp_size > 1:
            seconds += layout.pp_size * self._hand_over(layout)
        return seconds * self.profile.factor("exchange")

    def _hand_over(self, layout: Layout) -> float:
        """Of a pipeline stage and one micro-batch: the residual stream to the next stage, and its gradient back."""
        batch = self.memory.batch_of(layout)
        numel = batch.rows * batch.sequence_length * self.config.model.hidden_size
        return 2 * send_s(numel * self.memory.precision.residual, self.cluster, self.nodes, self.profile)

    def _collective(self, kind: CollectiveKind, num_bytes: float, group: Group) -> float:
        return collective_s(kind, num_bytes, group, self.nodes, self.profile) / self._share()

    def _reduction(self, layout: Layout, steps: int) -> float:
        """Stages 0 and 1 reduce once a step; 2 and 3 with every micro-batch (DeepSpeed 0.19.8)."""
        counts = self.memory.counts(layout).divided(layout.tp_size)
        width, stage = self.memory.precision.weights, layout.zero_stage
        everyone = strided(layout.dp_size, layout.tp_size, self.nodes)
        same = strided(layout.dp_size // layout.ep_size, layout.ep_size * layout.tp_size, self.nodes)
        experts = 0 if layout.stream_experts else counts.experts
        parts = ((counts.local - counts.experts, everyone), (experts, same))
        times = steps if stage >= 2 else 1
        seconds = 0.0
        for numel, group in parts:
            if stage == 3:
                seconds += 3 * steps * self._collective("all_gather", numel * width, group)
                continue
            # Stages 1 and 2 reduce buckets that belong to several ranks by an all-reduce, too.
            seconds += times * self._collective("all_reduce", numel * (4 if stage == 0 else width), group)
            if stage > 0:
                seconds += self._collective("all_gather", numel * width, group)
        if layout.stream_experts:
            seconds += steps * self._collective("all_reduce", counts.experts * 2, same)
        return seconds

    def _update(self, layout: Layout, steps: int, compute: float) -> tuple[float, float]:
        """Seconds of the update on the device, and of everything that has to do with host memory."""
        counts = self.memory.counts(layout).divided(layout.tp_size)
        stage, width = layout.zero_stage, self.memory.precision.weights
        owned, owned_experts = float(counts.local - counts.experts), float(counts.experts)
        if stage > 0:
            owned /= layout.dp_size
            owned_experts /= layout.dp_size // layout.ep_size
        host = 0.0
        if layout.stream_experts:
            host = self._streaming(counts.experts, steps, compute)
            owned_experts = 0
        owned += owned_experts
        moved = _PARTITION_BYTES + _BUCKET_BYTES * (steps if stage > 1 else 1) if stage > 0 else 0
        copies = moved * counts.local / self._memory_bandwidth()
        if not layout.offload_optimizer:
            optimizer = self.config.deepspeed.optimizer_type
            measured = self.profile.update_s_per_parameter.get(optimizer)
            each = _UPDATE_BYTES[optimizer] / self._memory_bandwidth() if measured is None else measured / self._share()
            return owned * each + copies, host
        down = owned * (4 if steps == 1 else 2 * steps + 4)
        up = owned * (width if steps == 1 else width + 2 * steps)
        if layout.offload_params:
            up += owned * 4 * steps
        return copies, host + (down + up) / self._host_rate() + self._host_update(owned)

    def _streaming(self, numel: int, steps: int, compute: float) -> float:
        """What sticks out: weights come once for the forward and once for the backward pass of a micro-batch."""
        up, down = 2 * steps * 2 * numel / self._host_rate(), steps * 2 * numel / self._host_rate()
        return max(0.0, max(up, down, self._host_update(numel)) - compute)

    def _host_update(self, numel: float) -> float:
        """All ranks of a node update at the same time and share its memory and cores."""
        optimizer, host = self.config.deepspeed.optimizer_type, self.nodes.host
        ranks = self.nodes.devices_per_node
        measured = self.profile.host_update_s_per_parameter.get(optimizer)
        if measured is not None:
            return numel * measured * max(1.0, ranks / host.cpus)
        rate = host.memory_bandwidth_bytes_per_s * self.profile.bandwidth_efficiency / ranks
        return numel * _HOST_UPDATE_BYTES[optimizer] / rate

    def _host_rate(self) -> float:
        link = self.nodes.links.host
        if self.profile.host_copy_bytes_per_s is not None:
            return self.profile.host_copy_bytes_per_s
        if link is None:
            return self._memory_bandwidth()
        return link.bandwidth_bytes_per_s * self.profile.bandwidth_efficiency
