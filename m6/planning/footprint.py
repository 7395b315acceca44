"""Bytes per part that a layout needs on its fullest rank and in the memory of a node, in closed form.

The sums of :mod:`m6.planning.memory`, over a folded model and for every layout, also those that the engine refuses:
what does not run must still be priced to say why. Exact for model states but at ZeRO stage 2, where the gradient of
a parameter across a boundary is kept whole: here at most that much is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from m6.config.run import RunConfig
from m6.model.sharing import Sharing
from m6.planning.activations import FP32, Activations, BatchShape, Precision
from m6.planning.folding import FoldedModel, Shape, fold
from m6.planning.layout import Layout
from m6.planning.memory import MAX_LIVE_PARAMETERS, PERSISTENCE_THRESHOLD, moment_bytes
from m6.planning.profile import Profile

BUCKET_NUMEL = 500_000_000  # DeepSpeed's default of reduce_bucket_size, and of the buffers at stage 0
_MASTER_AND_MOMENTS = 3
# Of a rank's weights and gradients, made while ZeRO flattens the former at the start and the latter in every step. A
# CPU's allocator keeps what they took: found by configurations of scripts/benchmarks/planner.
_KEPT_COPIES = 4
_STREAM_WINDOW_LAYERS = 2
# DeepSpeed 0.19.8 beside 16-bit weights, a census of live storages after two steps: bytes of host memory for each
# parameter that a rank owns. Stages 1 and 2 with one micro-batch a step and with more; stage 3 without the weights
# on the host and with them.
_HOST_BYTES = {"one": 21, "many": 23}
_HOST_BYTES_STAGE_3 = {False: 18, True: 20}
# With a master that is split into the 16 bits that are sent and the 16 that are not.
_STREAMED_HOST_BYTES = {"AdamW": 12, "Adafactor": 4}


@dataclass(frozen=True)
class Footprint:
    """Bytes; all but ``host`` and ``host_process`` in the memory of a device.

    ``peak`` is an upper estimate: gradients fill up while activations are freed. Not in it are the gradients within
    a block that is computed anew, which can exceed that by half a percent.
    """

    weights: int = 0
    """as the forward pass reads them, with what may be gathered or streamed at one time"""
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    """kept by autograd for one micro-batch, and beside it the gradients of its logits"""
    buckets: int = 0
    """DeepSpeed's buffers for the reduction of gradients"""
    update: int = 0
    """during the optimizer's step, when the activations are gone"""
    process: int = 0
    """of the driver, the libraries and the allocator: calibrated, 0 by default"""
    host: int = 0
    """states of one rank in host memory"""
    host_process: int = 0
    """of the program itself, in host memory: calibrated, 0 by default"""

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + self.process

    @property
    def peak(self) -> int:
        return self.resident + max(self.activations + self.buckets, self.update)

    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class MemoryModel:
    """Footprints of one run's layouts.

    Args:
        config: the run.
        profile: calibrated overheads.
        batch: the shape of a micro-batch; see :func:`full_row`.
        sharing: what the layers share, to price the Pseudo stage.
        on_touch: memory counts once something was written to it, as that of a CPU, and not when it is asked for.
    """

    def __init__(
        self,
        config: RunConfig,
        profile: Profile,
        batch: BatchShape | None = None,
        sharing: Sharing | None = None,
        on_touch: bool = False,
    ) -> None:
        self.config, self.profile, self.sharing, self.on_touch = config, profile, sharing, on_touch
        self.row = batch or full_row(config)
        self.model: FoldedModel = fold(config.model, sharing)
        self.precision = Precision.of(config)
        self._activations: dict[tuple[int, bool, int], tuple[int, int, int]] = {}
        self._counts: dict[tuple[int, int], _Counts] = {}

    def __call__(self, layout: Layout) -> Footprint:
        counts = self.counts(layout)
        activations = self._activation_bytes(layout)
        states = self._states(layout, counts)
        return replace(
            states, activations=activations, process=self.profile.process_bytes, host_process=self.profile.host_bytes
        )

    def counts(self, layout: Layout) -> _Counts:
        """Parameters of a rank of the fullest pipeline stage, before tensor parallelism divides them."""
        key = layout.ep_size, layout.pp_size
        if key not in self._counts:
            self._counts[key] = _count(self.model.fullest_stage(layout.pp_size), layout.ep_size)
        return self._counts[key]

    def batch_of(self, layout: Layout) -> BatchShape:
        return scale_batch(self.row, layout.micro_batch_size)

    def activations_of(self, layout: Layout) -> Activations:
        return Activations(with_training(self.config, layout), self.batch_of(layout))

    def _activation_bytes(self, layout: Layout) -> int:
        key = (layout.micro_batch_size, layout.checkpointing, layout.ep_size)
        if key not in self._activations:
            found = self.activations_of(layout)
            total = found.total() + found.loss_backward()
            self._activations[key] = (total, found.kept_by_blocks(), found.replicated())
        total, blocks, replicated = self._activations[key]
        # A stage of a pipeline keeps as many micro-batches as stages follow; the first keeps the most.
        in_flight = min(layout.pp_size, layout.accumulation(self.config.deepspeed.train_batch_size))
        kept = (replicated + (blocks - replicated) // layout.tp_size) * in_flight // layout.pp_size
        return math.ceil((kept + (total - blocks) // layout.tp_size) * self.profile.activation_factor)

    def _states(self, layout: Layout, counts: _Counts) -> Footprint:
        width, stage, world = self.precision.weights, layout.zero_stage, layout.world_size
        counts = counts.divided(layout.tp_size)
        if layout.stream_experts:
            return self._streamed(layout, counts)
        if stage == 0:
            numel = counts.local
            copies = min(BUCKET_NUMEL, counts.matrices + counts.vectors) * FP32 if world > 1 else 0
            optimizer = self.config.deepspeed.optimizer_type
            return Footprint(
                weights=numel * FP32 + counts.fixed(width),
                gradients=numel * FP32,
                optimizer_state=counts.moments(optimizer),
                buckets=copies,
                update=2 * counts.largest_update * FP32 if optimizer == "Adafactor" else 0,
            )
        if stage == 3:
            return self._stage_3(layout, counts)
        partitions = counts.partitions(layout.dp_size, layout.ep_size)
        owned = sum(partitions)
        gradients = counts.local if stage == 1 else min(counts.local, owned + counts.largest)
        padded = sum(part * ranks for part, ranks in zip(partitions, counts.ranks(layout), strict=True))
        bucket = self._bucket(counts.local)
        weights = padded * width + counts.fixed(width)
        if layout.offload_optimizer:
            kind = "one" if layout.accumulation(self.config.deepspeed.train_batch_size) == 1 else "many"
            host = owned * (_HOST_BYTES[kind] + 2 * (width - 2))  # master, moments, gradient; buffers of the width
            device_gradients = counts.local * width if stage == 1 else 0
            return Footprint(weights=weights, gradients=device_gradients, buckets=bucket, host=host)
        return Footprint(
            weights=weights,
            gradients=gradients * width,
            optimizer_state=(owned * _MASTER_AND_MOMENTS + len(partitions)) * FP32,
            buckets=bucket,
            update=max(partitions) * FP32 if width < FP32 else 0,
        )

    def _bucket(self, local: int) -> int:
        """Bytes of the buffer through which stages 1 to 3 reduce gradients of ``local`` parameters."""
        section = self.config.deepspeed.keys.get("zero_optimization", {})
        if not section.get("contiguous_gradients", True):
            return 0
        numel = int(section.get("reduce_bucket_size", BUCKET_NUMEL))
        copies = 2 if section.get("overlap_comm") else 1
        if self.on_touch:
            return (min(numel, local) * copies + _KEPT_COPIES * local) * self.precision.weights
        return numel * self.precision.weights * copies

    def _stage_3(self, layout: Layout, counts: _Counts) -> Footprint:
        width, world = self.precision.weights, layout.dp_size
        section = self.config.deepspeed.keys.get("zero_optimization", {})
        threshold = section.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)
        max_live = section.get("stage3_max_live_parameters", MAX_LIVE_PARAMETERS)
        owned = counts.sharded(world)
        gathered = 0
        if world > 1:
            persistent = counts.persistent(threshold)
            rest = counts.local + counts.frozen - persistent
            gathered = persistent + min(rest, max(max_live, counts.largest_module))
        on_host = layout.offload_params
        weights = (gathered + (0 if on_host else owned + counts.frozen_shard(world))) * width + counts.buffer_bytes
        bucket = self._bucket(counts.local)
        if layout.offload_optimizer:
            host = owned * (_HOST_BYTES_STAGE_3[on_host] + 2 * (width - 2))
            return Footprint(weights=weights, buckets=bucket, host=host)
        return Footprint(
            weights=weights,
            gradients=owned * width,
            optimizer_state=(owned * _MASTER_AND_MOMENTS + counts.num_groups) * FP32,
            buckets=bucket,
            update=owned * FP32 if width < FP32 else 0,
            host=owned * width if on_host else 0,
        )

    def _streamed(self, layout: Layout, counts: _Counts) -> Footprint:
        """The dense part as without; of the experts two layers' weights and one layer's gradients, in 16 bits."""
        dense = self._states(replace(layout, stream_experts=False), replace(counts, experts=0, expert_moments={}))
        optimizer = self.config.deepspeed.optimizer_type
        return replace(
            dense,
            weights=dense.weights + _STREAM_WINDOW_LAYERS * counts.expert_layer * 2,
            gradients=dense.gradients + counts.expert_layer * 2,
            host=dense.host + counts.experts * _STREAMED_HOST_BYTES[optimizer],
        )


@dataclass(frozen=True)
class _Counts:
    """Elements that one rank holds before ZeRO partitions them; ``experts`` is zero where they are not split."""

    matrices: int
    vectors: int
    experts: int
    frozen: int
    buffer_bytes: int
    largest: int
    largest_module: int
    largest_update: int
    expert_layer: int
    """elements of one layer's experts"""
    sizes: tuple[tuple[int, int], ...]
    """(elements, how many) of the trainable parameters"""
    dense_moments: dict[str, int]
    expert_moments: dict[str, int]

    @property
    def local(self) -> int:
        return self.matrices + self.vectors + self.experts

    @property
    def num_groups(self) -> int:
        return sum(numel > 0 for numel in (self.matrices, self.experts, self.vectors))

    def divided(self, parts: int) -> _Counts:
        if parts == 1:
            return self
        names = ("matrices", "vectors", "experts", "largest", "largest_module", "largest_update", "expert_layer")
        return replace(self, **{name: math.ceil(getattr(self, name) / parts) for name in names})

    def moments(self, optimizer: str) -> int:
        return self.dense_moments[optimizer] + self.expert_moments.get(optimizer, 0)

    def fixed(self, width: int) -> int:
        return self.frozen * width + self.buffer_bytes

    def ranks(self, layout: Layout) -> list[int]:
        sizes = [layout.dp_size, layout.dp_size // layout.ep_size, layout.dp_size]
        groups = (self.matrices, self.experts, self.vectors)
        return [ranks for numel, ranks in zip(groups, sizes, strict=True) if numel > 0]

    def partitions(self, dp_size: int, ep_size: int) -> list[int]:
        """Elements of a rank's part of each group that DeepSpeed flattens; parts start at even places."""
        groups = ((self.matrices, dp_size), (self.experts, dp_size // ep_size), (self.vectors, dp_size))
        return [math.ceil(numel / (2 * ranks)) * 2 for numel, ranks in groups if numel > 0]

    def sharded(self, world: int) -> int:
        return sum(math.ceil(numel / world) * count for numel, count in self.sizes)

    def frozen_shard(self, world: int) -> int:
        return math.ceil(self.frozen / world)

    def persistent(self, threshold: int) -> int:
        return sum(numel * count for numel, count in self.sizes if numel <= threshold)


def full_row(config: RunConfig) -> BatchShape:
    """One row without padding in which every token is a target, with one picture: more than data ever holds."""
    length = config.m6.data.sequence_length
    return BatchShape(samples=1, rows=1, sequence_length=length, real=length, targets=length, pictures=1)


def scale_batch(batch: BatchShape, samples: int) -> BatchShape:
    """The shape of ``samples`` samples like those of ``batch``."""
    share = samples / batch.samples
    rows, *others = (math.ceil(number * share) for number in (batch.rows, batch.real, batch.targets, batch.pictures))
    return BatchShape(samples, rows, batch.sequence_length, *others)


def with_training(config: RunConfig, layout: Layout) -> RunConfig:
    """``config`` with what of ``layout`` matters to the activations, also where the run's validation refuses it."""
    update = {"ep_size": layout.ep_size, "activation_checkpointing": layout.checkpointing}
    training = config.m6.training.model_copy(update=update)
    return replace(config, m6=config.m6.model_copy(update={"training": training}))


def _count(model: FoldedModel, ep_size: int) -> _Counts:
    split = ep_size > 1
    matrices = vectors = experts = frozen = buffers = largest = largest_module = expert_layer = update = 0
    sizes: dict[int, int] = {}
    totals_of = {True: {"AdamW": 0, "Adafactor": 0}, False: {"AdamW": 0, "Adafactor": 0}}
    for block, _, stored in model.blocks:
        buffers += block.buffer_bytes
        stack = 0
        for index, shape in enumerate(block.shapes):
            is_expert = index in block.experts
            local: Shape = (shape[0] // ep_size, *shape[1:]) if is_expert and split else shape
            numel = math.prod(local)
            if index in block.frozen:
                frozen += numel
                continue
            stack += numel if is_expert else 0
            largest = max(largest, numel)
            update = max(update, math.prod(local[1:]) if is_expert else numel)
            sizes[numel] = sizes.get(numel, 0) + stored
            for optimizer, totals in totals_of[is_expert].items():
                totals_of[is_expert][optimizer] = totals + moment_bytes(local, optimizer) * stored
            if is_expert and split:
                experts += numel * stored
            elif len(local) > 1:
                matrices += numel * stored
            else:
                vectors += numel * stored
        largest_module = max(largest_module, largest, stack)
        expert_layer = max(expert_layer, stack)
    return _Counts(
        matrices,
        vectors,
        experts,
        frozen,
        buffers,
        largest,
        largest_module,
        update,
        expert_layer,
        tuple(sorted(sizes.items())),
        totals_of[False],
        totals_of[True],
    )
