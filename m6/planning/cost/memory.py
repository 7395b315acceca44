"""The bytes of a layout on its fullest rank, in the host memory of a node, and in checkpoints, as a closed form.

The partitions follow DeepSpeed 0.19.8 (ZeRO, arXiv 1910.02054, section 5). Weights and optimizer state are exact.
Gradients are exact, too, except at ZeRO stage 2: there DeepSpeed keeps whole gradients of parameters across the
boundary of a partition. The formula adds the largest parameter once for them. Activations have a formula of their own.
Layouts have a price even if the engine refuses them, so the planner can state their needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from m6.architecture.sharing import Sharing
from m6.checkpoints.format import SHARD_BYTES
from m6.config.run import RunConfig
from m6.config.sum_tree import most_sums
from m6.planning.cost.activations import (
    Activations,
    PipelineActivations,
    holds_copy_of_table,
    old_versions,
    with_training,
)
from m6.planning.cost.expert_store import ExpertStore, RankChunks, layer_numel, stored_numel, uses_of_experts
from m6.planning.cost.folding import Block, UniqueLayers, fold, shared_gradients
from m6.planning.cost.layout import ParallelLayout, is_asynchronous
from m6.planning.cost.parameter_counts import ParameterCounts, count_parameters
from m6.planning.machine.profile import Profile
from m6.training.optimizers import ADAMW_MOMENTS
from m6.training.reduction.messages import BUCKET_ELEMENTS, GradientTensor, is_compressed, messages
from m6.training.sizes import BUCKET_NUMEL, FP32, BatchShape, Precision, full_row, scale_batch
from moe.expectation import ExpectedRouting, expected_routing


@dataclass(frozen=True)
class MemoryFootprint:
    """Bytes of one rank. ``host`` and ``host_process`` are in host memory, the others on the device.

    Attributes:
        weights: in the type of the forward pass, with the weights gathered or streamed at one time.
        old_weights: weights of the version before, for passes in flight in a pipeline without a flush.
        gradients: between the backward pass and the update.
        partial_sums: of gradients of earlier micro-batches, with ``"deterministic": "any_world"``.
        residuals: unsent parts of a rank's gradients, with ``m6.communication``.
        optimizer_state: moments and step counters; at ZeRO stages 1 to 3 also the fp32 master weights; with
            ``m6.gradient_delay`` also the delayed gradients.
        owned_experts: experts of ``m6.offload`` owned by the device, with their gradients and optimizer state.
        activations: kept by autograd for one micro-batch, with the gradients of its logits.
        buckets: DeepSpeed's buffers for the reduction of gradients.
        update: temporaries of the optimizer's step, after the activations are freed; without a flush also the
            activations in flight.
        process: driver, libraries and allocator; calibrated, 0 by default.
        host: states of the rank in host memory.
        store: the share of ``m6.offload`` in ``host``: the other experts with their gradients and optimizer state.
        host_process: the program itself in host memory; calibrated, 0 by default.
    """

    weights: int = 0
    old_weights: int = 0
    gradients: int = 0
    partial_sums: int = 0
    residuals: int = 0
    optimizer_state: int = 0
    owned_experts: int = 0
    activations: int = 0
    buckets: int = 0
    update: int = 0
    process: int = 0
    host: int = 0
    store: int = 0
    host_process: int = 0

    @property
    def resident(self) -> int:
        """Bytes on the device during the whole step."""
        sums = self.gradients + self.partial_sums + self.residuals
        return self.weights + self.old_weights + sums + self.optimizer_state + self.owned_experts + self.process

    @property
    def peak(self) -> int:
        """An upper estimate of the device memory: gradients fill up while activations are freed. It leaves out the
        gradients within a recomputed block. With these the memory can exceed the estimate by half a percent."""
        return self.resident + max(self.activations + self.buckets, self.update)

    def parts(self) -> dict[str, int]:
        """The bytes by name; they add up."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "store"}


# DeepSpeed's defaults of keys in zero_optimization.
PERSISTENCE_THRESHOLD = 100_000
MAX_LIVE_PARAMETERS = 1_000_000_000
_MASTER_AND_MOMENTS = 1 + ADAMW_MOMENTS
# ZeRO flattens weights at the start and gradients in every step. The allocator of a CPU keeps the memory of so many
# copies of a rank's parameters. Found with the configurations of scripts/benchmarks/planner.
_KEPT_COPIES = 4
_STREAM_WINDOW_LAYERS = 2
# Bytes of host memory per parameter owned by a rank, with 16-bit weights: the live storages of DeepSpeed 0.19.8 after
# two steps. Stages 1 and 2 with one micro-batch a step, and with more; stage 3 without offloaded weights, and with
# them.
_HOST_BYTES = {"one": 21, "many": 23}
_HOST_BYTES_STAGE_3 = {False: 18, True: 20}
# Copies of all compressed gradients made by a reducer in addition to their sums, and copies of a bucket in an exchange
# of partial sums: the live storages of m6/training/reduction and m6/training/engine/tree_gradients.py.
_REDUCER_COPIES = {"top_k": 1, "chunks": 3, "powersgd": 2}
_BUCKET_COPIES = 3


class MemoryModel:
    """Computes the footprints of one run's layouts.

    Args:
        config: the run.
        profile: calibrated overheads.
        batch: the shape of a micro-batch of any size; None: :func:`full_row`.
        sharing: what the layers share in the Pseudo phase; None: nothing.
        on_cpu: the device is a CPU. Memory counts at its first write, and not at its allocation; with
            ``"deterministic": "any_world"`` AdamW is not fused.
        device_bytes: of a device; experts of ``m6.offload`` may fill the free part. None: all of them are streamed.
    """

    def __init__(
        self,
        config: RunConfig,
        profile: Profile,
        batch: BatchShape | None = None,
        sharing: Sharing | None = None,
        on_cpu: bool = False,
        device_bytes: int | None = None,
    ) -> None:
        self.config, self.profile, self.sharing, self.on_cpu = config, profile, sharing, on_cpu
        self.device_bytes = device_bytes
        # See build_engine: there the bits would depend on the borders of partitions.
        self._is_unfused = on_cpu and config.m6.training.deterministic is not None
        self.row = batch or full_row(config)
        self.model: UniqueLayers = fold(config.model, sharing)
        self.precision = Precision.of(config)
        self._moe = None if config.m6.moe is None else config.model.moe_config()
        self._activations: dict[tuple[int | bool, ...], tuple[int, int, int]] = {}
        self._pipelines: dict[tuple[int | bool, ...], PipelineActivations] = {}
        self._counts: dict[tuple[int, bool, bool, tuple[tuple[Block, int, int], ...]], ParameterCounts] = {}
        self._chunks: dict[tuple[int, int, bool, tuple[tuple[Block, int, int], ...]], RankChunks] = {}
        self._expert_stores: dict[tuple[int, int], ExpertStore] = {}
        self._owned_shares: dict[ParallelLayout, list[float]] = {}
        self._parts_of: dict[tuple[int, str, tuple[int, ...]], list[UniqueLayers]] = {}

    def __call__(self, layout: ParallelLayout) -> MemoryFootprint:
        """The footprint of the fullest rank."""
        return max(self.footprints(layout), key=lambda footprint: footprint.peak)

    def footprints(self, layout: ParallelLayout) -> list[MemoryFootprint]:
        """The footprint of each rank of a pipeline. Without a pipeline: one footprint for all ranks."""
        return [self.footprint(layout, place, self._stages(layout, place)) for place in range(layout.pp_size)]

    def footprint(self, layout: ParallelLayout, place: int, stages: Sequence[range]) -> MemoryFootprint:
        """The footprint of a rank.

        Args:
            place: of the rank in the pipeline.
            stages: the layers of each of its stages, in the order of the model.
        """
        part, pipeline = self._part(layout, stages), layout.pipeline
        counts = self._counts_of(layout, part)
        states, in_flight = self._with_own_sums(self._states(layout, counts), layout, counts.divided(layout), part), 0
        if pipeline is not None and is_asynchronous(self.config, layout):
            states = self._with_two_versions(states, layout, place, counts.divided(layout))
            in_flight = self._pipelined(layout).between_steps(pipeline, place, stages)
        if pipeline is not None and holds_copy_of_table(pipeline, place):
            numel = math.ceil(self.config.model.vocab_size / layout.tp_size) * self.config.model.hidden_size
            copy = numel * self.precision.weights
            # The copy has two gradients, too: the first rank ends its step later.
            sums = 2 if is_asynchronous(self.config, layout) else 1
            states = replace(states, weights=states.weights + copy, gradients=states.gradients + sums * copy)
            if self.config.m6.training.deterministic is not None:
                partial = FP32 * self._any_world_sums(layout)[0] * numel
                states = replace(states, partial_sums=states.partial_sums + partial)
        rest = replace(
            states,
            activations=self._activation_bytes(layout, place, stages),
            update=states.update + math.ceil(in_flight * self.profile.activation_factor),
            process=self.profile.process_bytes,
            host_process=self.profile.host_bytes,
        )
        return self._with_store(rest, layout, part) if layout.stream_experts else rest

    def counts(self, layout: ParallelLayout) -> ParameterCounts:
        """Parameters of the rank with most of them, before tensor parallelism divides them. Streamed experts are
        excluded, as DeepSpeed does not know them."""
        return max(self.counts_of_ranks(layout), key=lambda counts: counts.local)

    def counts_of_ranks(self, layout: ParallelLayout) -> list[ParameterCounts]:
        """The same of each rank of a pipeline."""
        return [self._counts_of(layout, part) for part in self._parts(layout)]

    def used_by_rank(self, layout: ParallelLayout, place: int) -> ParameterCounts:
        """The same of a rank of a pipeline, with a parameter counted once for each layer that uses it."""
        return self._counts_of(layout, self._parts(layout)[place].without_sharing())

    def _counts_of(self, layout: ParallelLayout, part: UniqueLayers) -> ParameterCounts:
        in_groups = layout.tp_size > layout.outer_parts
        key = (layout.ep_size, layout.stream_experts, in_groups, part.blocks)
        if key not in self._counts:
            self._counts[key] = count_parameters(part, layout.ep_size, not layout.stream_experts, in_groups)
        return self._counts[key]

    def _part(self, layout: ParallelLayout, stages: Sequence[range]) -> UniqueLayers:
        """The part of the model on a rank with these stages."""
        return self.model if layout.pp_size == 1 else self.model.part([layer for stage in stages for layer in stage])

    def _stages(self, layout: ParallelLayout, place: int) -> list[range]:
        num_layers, pipeline = self.model.num_layers, layout.pipeline
        if pipeline is None:
            return [range(num_layers)]
        cut = pipeline.cut(num_layers)
        return [cut[stage] for stage in pipeline.stages_of(place)]

    def stored_experts(self, layout: ParallelLayout) -> int:
        """Elements of the experts in ``m6.offload`` on the rank with most of them, before tensor parallelism divides
        them."""
        return max(self.experts_of_ranks(layout))

    def experts_of_ranks(self, layout: ParallelLayout) -> list[int]:
        """The same of each rank of a pipeline."""
        if not layout.stream_experts:
            return [0] * layout.pp_size
        return [stored_numel(part, layout.ep_size) for part in self._parts(layout)]

    def owned_share_of_ranks(self, layout: ParallelLayout) -> list[float]:
        """The device's share of the experts, for each rank of a pipeline. Experts owned by the device never move."""
        if not layout.stream_experts:
            return [0.0] * layout.pp_size
        if layout not in self._owned_shares:
            wholes = (self._chunks_of(layout, part).total for part in self._parts(layout))
            owned = (footprint.owned_experts * layout.outer_parts for footprint in self.footprints(layout))
            shares = [min(1.0, own / max(1, whole)) for own, whole in zip(owned, wholes, strict=True)]
            self._owned_shares[layout] = shares
        return self._owned_shares[layout]

    def _parts(self, layout: ParallelLayout) -> list[UniqueLayers]:
        """The part of the model on each rank of a pipeline."""
        key = (layout.pp_size, layout.schedule, layout.cut)
        if key not in self._parts_of:
            places = range(layout.pp_size)
            self._parts_of[key] = [self._part(layout, self._stages(layout, place)) for place in places]
        return self._parts_of[key]

    def exchange_parts(self, layout: ParallelLayout) -> int:
        """The parts of the exchange of a micro-batch's tokens. Each part yields one gradient of every expert."""
        return 1 if self._moe is None else self._moe.exchange_parts(layout.ep_size)

    def expert_store(self, layout: ParallelLayout) -> ExpertStore:
        """How ``m6.offload`` keeps the experts of the run in ``layout``."""
        key = layout.backward_passes(self.config.deepspeed.train_batch_size), layout.ep_size
        if key not in self._expert_stores:
            several = uses_of_experts(self.model) > 1 or self.exchange_parts(layout) > 1
            self._expert_stores[key] = ExpertStore.of(self.config, key[0], several)
        return self._expert_stores[key]

    def batch_of(self, layout: ParallelLayout) -> BatchShape:
        """The shape of a micro-batch of the layout's size."""
        return scale_batch(self.row, layout.micro_batch_size)

    def expected_routing(self, layout: ParallelLayout) -> ExpectedRouting | None:
        """The choices within the capacity, expected for a micro-batch of this size; None: the model is dense."""
        model = self.config.model
        return None if model.moe is None else expected_routing(model.moe_config(), self.batch_of(layout).real)

    def activations_of(self, layout: ParallelLayout) -> Activations:
        """The activations of one micro-batch, by part of the model."""
        parts = layout.tp_size // layout.outer_parts
        return Activations(with_training(self.config, layout), self.batch_of(layout), parts, layout.sequence_parallel)

    def _activation_bytes(self, layout: ParallelLayout, place: int, stages: Sequence[range]) -> int:
        if layout.pipeline is not None:
            micro_batches = layout.accumulation(self.config.deepspeed.train_batch_size)
            kept = self._pipelined(layout).bytes(layout.pipeline, place, stages, micro_batches)
            return math.ceil(kept * self.profile.activation_factor)
        at_once = layout.overlap_micro_batches
        groups = layout.tp_size, layout.outer_parts, layout.sequence_parallel
        key = (layout.micro_batch_size, layout.checkpointing, layout.ep_size, *groups, at_once)
        if key not in self._activations:
            found = self.activations_of(layout)
            total = at_once * found.total() + found.loss_backward(at_once)
            self._activations[key] = (total, at_once * found.kept_by_blocks(), at_once * found.replicated())
        total, blocks, replicated = self._activations[key]
        kept = replicated + (blocks - replicated) // layout.tp_size
        outside = (total - blocks) // layout.outer_parts
        return math.ceil((kept + outside) * self.profile.activation_factor)

    def _pipelined(self, layout: ParallelLayout) -> PipelineActivations:
        groups = layout.tp_size, layout.outer_parts, layout.sequence_parallel
        key = (layout.micro_batch_size, layout.checkpointing, layout.ep_size, *groups)
        if key not in self._pipelines:
            found = self.activations_of(layout)
            self._pipelines[key] = PipelineActivations(found, layout.tp_size, layout.outer_parts)
        return self._pipelines[key]

    def _states(self, layout: ParallelLayout, counts: ParameterCounts) -> MemoryFootprint:
        """Weights, gradients, optimizer state and buffers."""
        counts = counts.divided(layout)
        if layout.zero_stage == 0:
            return self._stage_0(layout, counts)
        if layout.zero_stage == 3:
            return self._stage_3(layout, counts)
        return self._stages_1_and_2(layout, counts)

    def _stage_0(self, layout: ParallelLayout, counts: ParameterCounts) -> MemoryFootprint:
        # The validation refuses 16 bits at stage 0, so weights and gradients are fp32 here.
        numel, optimizer_type = counts.local, self.config.deepspeed.optimizer_type
        copies = min(BUCKET_NUMEL, counts.matrices + counts.vectors) * FP32 if layout.world_size > 1 else 0
        return MemoryFootprint(
            weights=numel * FP32 + counts.fixed(self.precision.weights),
            gradients=numel * FP32,
            optimizer_state=counts.moments(optimizer_type) + self._delayed_bytes(numel),
            buckets=copies,
            update=2 * counts.largest_update * FP32
            if optimizer_type == "Adafactor"
            else max(self._muon_temporaries(counts), self._unfused_bytes(counts.largest, counts.largest)),
        )

    def _stages_1_and_2(self, layout: ParallelLayout, counts: ParameterCounts) -> MemoryFootprint:
        width, stage = self.precision.weights, layout.zero_stage
        groups = counts.groups(self.config.deepspeed.optimizer_type)
        ranks = [layout.partitions(group.of_experts) for group in groups]
        partitions = [group.partition(number) for group, number in zip(groups, ranks, strict=True)]
        owned = sum(partitions)
        gradients = counts.local if stage == 1 else min(counts.local, owned + counts.largest)
        padded = sum(part * number for part, number in zip(partitions, ranks, strict=True))
        bucket = self._bucket(counts.local)
        weights = padded * width + counts.fixed(width)
        if layout.offload_optimizer:
            kind = "one" if layout.backward_passes(self.config.deepspeed.train_batch_size) == 1 else "many"
            host = owned * (_HOST_BYTES[kind] + 2 * (width - 2))  # two of the buffers are as wide as the weights
            device_gradients = counts.local * width if stage == 1 else 0
            return MemoryFootprint(weights=weights, gradients=device_gradients, buckets=bucket, host=host)
        return MemoryFootprint(
            weights=weights,
            gradients=gradients * width,
            optimizer_state=sum(group.state(part) for part, group in zip(partitions, groups, strict=True)) * FP32
            + self._delayed_bytes(owned),
            buckets=bucket,
            # DeepSpeed copies the gradients of a parameter group into one tensor, and 16-bit ones from there to fp32.
            update=max(
                part * (width + FP32 if width < FP32 else width) + (0 if group.by_muon else self._unfused_bytes(part))
                for part, group in zip(partitions, groups, strict=True)
            )
            + self._muon_temporaries(counts),
        )

    def _with_own_sums(
        self, states: MemoryFootprint, layout: ParallelLayout, counts: ParameterCounts, part: UniqueLayers
    ) -> MemoryFootprint:
        """``states`` with the fp32 sums of the engines for ``"deterministic": "any_world"`` and ``m6.communication``.
        These engines sum gradients themselves."""
        width, settings = self.precision.weights, self.config.m6.communication
        if self.config.m6.training.deterministic is not None:
            kept, most = self._any_world_sums(layout)
            held, bucket = width + FP32 * kept, min(counts.local, max(BUCKET_ELEMENTS, counts.largest))
            exchange = _BUCKET_COPIES * FP32 * bucket if layout.dp_size > 1 else 0
            # At the optimizer's step one sum of all gradients is left.
            update = max(states.update + (FP32 - held) * counts.local, (FP32 * most - held) * counts.local + exchange)
            return replace(states, partial_sums=FP32 * kept * counts.local, update=update)
        if not settings.compresses:
            return states
        residuals, ranks = self._residual_bytes(layout, part), layout.dp_size
        density = settings.density_of(settings.warmup_steps)
        sent = messages(shared_gradients(part, layout), settings, density, ranks).gathered
        # The sums and 16-bit gradients in fp32, the reducer's copies, and the messages of all ranks.
        sums = counts.local * (FP32 if width == FP32 else 2 * FP32)
        temporaries = sums + _REDUCER_COPIES[settings.gradients] * residuals + sent * (ranks + 1)
        return replace(states, residuals=residuals, update=max(states.update + counts.local * FP32, temporaries))

    def _any_world_sums(self, layout: ParallelLayout) -> tuple[int, int]:
        """Copies of all gradients in fp32: (during the last backward pass, the most after it). After it the new
        gradients coexist with the partial sums, or the sum of the rank with the sum of all ranks."""
        shares = layout.batch_split().shares(self.config.deepspeed.train_batch_size)
        kept, branches = most_sums(tuple(share // layout.overlap_micro_batches for share in shares[:: layout.ep_size]))
        return kept, max(kept + 1, branches + (layout.dp_size > 1))

    def residual_bytes(self, layout: ParallelLayout) -> int:
        """Bytes of the unsent parts of compressed gradients, on the rank with most of them. The factors of powersgd are
        negligible."""
        if not self.config.m6.communication.compresses:
            return 0
        return max(self._residual_bytes(layout, part) for part in self._parts(layout))

    def shared_gradients(self, layout: ParallelLayout) -> list[GradientTensor]:
        """The gradients common to all replicas of a rank, for the rank with most elements of them."""
        found = (shared_gradients(part, layout) for part in self._parts(layout))
        return max(found, key=lambda gradients: sum(gradient.numel for gradient in gradients))

    def _residual_bytes(self, layout: ParallelLayout, part: UniqueLayers) -> int:
        settings = self.config.m6.communication
        gradients = shared_gradients(part, layout)
        return FP32 * sum(gradient.numel for gradient in gradients if is_compressed(gradient, settings))

    def _delayed_bytes(self, owned: int) -> int:
        """Bytes of delayed gradients in fp32. They wait for the end of the next step."""
        return 0 if self.config.m6.gradient_delay is None else owned * FP32

    def _with_two_versions(
        self, states: MemoryFootprint, layout: ParallelLayout, place: int, counts: ParameterCounts
    ) -> MemoryFootprint:
        """``states`` with the needs of a pipeline without a flush: copies of old weights for passes in flight, and the
        gradients of the finished step until the update."""
        micro_batches = layout.accumulation(self.config.deepspeed.train_batch_size)
        copies = old_versions(layout.pp_size - 1 - place, micro_batches)
        groups = counts.groups(self.config.deepspeed.optimizer_type)
        partitions = (group.partition(layout.partitions(group.of_experts)) for group in groups)
        waiting = counts.local if layout.zero_stage == 0 else sum(partitions)
        width = self.precision.weights
        return replace(
            states,
            old_weights=counts.local * width * copies,
            gradients=states.gradients + waiting * width,
        )

    def _muon_temporaries(self, counts: ParameterCounts) -> int:
        if self.config.deepspeed.optimizer_type != "Muon":
            return 0
        return max((part.temporaries(self.precision.compute) for part in counts.muon), default=0)

    def _unfused_bytes(self, numel: int, before: int = 0) -> int:
        """Bytes made by an unfused AdamW for a tensor of ``numel`` elements: the root of its second moments, the root
        divided, and the divided root of the tensor ``before`` in the same group."""
        by_adamw = self.config.deepspeed.optimizer_type in ("AdamW", "Muon")
        return FP32 * (2 * numel + before) if self._is_unfused and by_adamw else 0

    def _bucket(self, local: int) -> int:
        """Bytes of the reduction buffer of stages 1 to 3 for the gradients of ``local`` parameters."""
        section = self.config.deepspeed.keys.get("zero_optimization", {})
        if not section.get("contiguous_gradients", True):
            return 0
        numel = int(section.get("reduce_bucket_size", BUCKET_NUMEL))
        copies = 2 if section.get("overlap_comm") else 1
        if self.on_cpu:
            # Gradients touch no more of a bucket than their own size.
            return (min(numel, local) * copies + _KEPT_COPIES * local) * self.precision.weights
        return numel * self.precision.weights * copies

    def _stage_3(self, layout: ParallelLayout, counts: ParameterCounts) -> MemoryFootprint:
        width, world = self.precision.weights, layout.dp_size
        section = self.config.deepspeed.keys.get("zero_optimization", {})
        threshold = section.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)
        max_live = section.get("stage3_max_live_parameters", MAX_LIVE_PARAMETERS)
        owned = counts.sharded(world)
        gathered = 0
        if world > 1:
            # A module is gathered whole, even where it alone exceeds the limit on live parameters.
            persistent = counts.persistent(threshold)
            rest = counts.local + counts.frozen - persistent
            gathered = persistent + min(rest, max(max_live, counts.largest_module))
        on_host = layout.offload_params
        weights = (gathered + (0 if on_host else owned + counts.frozen_shard(world))) * width + counts.buffer_bytes
        bucket = self._bucket(counts.local)
        if layout.offload_optimizer:
            host = owned * (_HOST_BYTES_STAGE_3[on_host] + 2 * (width - 2))
            return MemoryFootprint(weights=weights, buckets=bucket, host=host)
        return MemoryFootprint(
            weights=weights,
            gradients=owned * width,
            optimizer_state=(owned * _MASTER_AND_MOMENTS + len(counts.groups("AdamW"))) * FP32,
            buckets=bucket,
            update=owned * FP32 if width < FP32 else 0,
            host=owned * width if on_host else 0,
        )

    def _with_store(self, rest: MemoryFootprint, layout: ParallelLayout, part: UniqueLayers) -> MemoryFootprint:
        """``rest`` with the experts of ``m6.offload``.

        If all of them fit into the rest of the device, the device owns them all. Otherwise it holds two layers'
        weights, one layer's gradients and as many whole chunks as fit; the host holds the other chunks. If
        micro-batches are interleaved, the device also holds sums of one layer's gradients, in both cases.
        """
        chunks, share = self._chunks_of(layout, part), layout.outer_parts
        store, numel = self.expert_store(layout), math.ceil(layer_numel(self.model, layout.ep_size) / share)
        if self.config.m6.training.deterministic is not None:  # in host memory, wherever the experts are
            sums = FP32 * self._any_world_sums(layout)[1] * math.ceil(stored_numel(part, layout.ep_size) / share)
            rest = replace(rest, host=rest.host + sums)
        rest = replace(rest, gradients=rest.gradients + numel * store.sum_bytes(layout.overlap_micro_batches))
        room = -1 if self.device_bytes is None else self.device_bytes - rest.peak
        if chunks.total <= room * share:
            return replace(rest, owned_experts=math.ceil(chunks.total / share))
        layer = numel * store.weight_bytes
        owned = chunks.fitting((room - (_STREAM_WINDOW_LAYERS + 1) * layer) * share)
        on_host = math.ceil(chunks.on_host(owned) / share)
        return replace(
            rest,
            weights=rest.weights + _STREAM_WINDOW_LAYERS * layer,
            gradients=rest.gradients + layer,
            owned_experts=math.ceil(owned / share),
            host=rest.host + on_host,
            store=on_host,
        )

    def _chunks_of(self, layout: ParallelLayout, part: UniqueLayers) -> RankChunks:
        """The chunks of a rank with ``part`` of the model, before tensor parallelism divides them."""
        store = self.expert_store(layout)
        gradient = 0 if store.gradient_dtype is None else store.gradient_dtype.itemsize
        key = layout.ep_size, gradient, store.next_weights == "copy", part.blocks
        if key not in self._chunks:
            self._chunks[key] = store.chunks(part, layout.ep_size)
        return self._chunks[key]


def checkpoint_bytes(memory: MemoryModel, layout: ParallelLayout) -> float:
    """Bytes of one rank in a checkpoint, all in fp32: weights, moments, and delayed gradients."""
    counts = memory.counts(layout).divided(layout)
    replicas = layout.expert_copies
    owned = (counts.local - counts.experts) / layout.dp_size + counts.experts / replicas
    late = 0 if memory.config.m6.gradient_delay is None else FP32
    written = owned * (_state_bytes(memory.config.deepspeed.optimizer_type) + late) + memory.residual_bytes(layout)
    streamed = memory.stored_experts(layout) / layout.outer_parts / replicas
    if streamed:
        written += streamed * (_state_bytes(memory.expert_store(layout).optimizer_type) + late)
    return written


def copied_bytes(memory: MemoryModel, layout: ParallelLayout) -> float:
    """Bytes of one rank in host memory during a save: the whole checkpoint, or with ``async_save: false`` one file."""
    whole = checkpoint_bytes(memory, layout)
    return whole if memory.config.m6.checkpoint.async_save else min(whole, SHARD_BYTES)


def _state_bytes(optimizer_type: str) -> int:
    """The weight, and two moments or a momentum. Adafactor's row and column means are negligible."""
    return {"AdamW": 12, "Lamb": 12, "SGD": 8, "Muon": 8, "Lars": 8, "Adafactor": 4}[optimizer_type]
