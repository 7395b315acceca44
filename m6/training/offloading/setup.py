"""Prepares offloading before memory is allocated: budgets, dry trace of a step, chunk size and first plan.

The dry trace runs a rank's model on fake tensors, before the first real step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.architecture.sharing import Sharing
from m6.config.offload import OffloadSettings
from m6.config.offload_rules import LayerModule, resolve_activation_rules, resolve_rules
from m6.config.run import RunConfig
from m6.config.section_checks import offloads_states
from m6.data.collate import MicroBatch
from m6.errors import UserError
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.stages import ModelStage, keep_layers
from m6.runs.environment import ranks_per_node
from m6.training.fake_world import FakeWorld, fake_batch, fake_tensors
from m6.training.mesh import ParallelDims
from m6.training.meta_model import build_meta_model
from m6.training.offloading.modules import ExpertUse, experts_of, offload_activations, stream
from m6.training.optimizers import DTYPES, expert_optimizer, gradient_dtype_of, next_weights_of, state_bytes
from m6.training.pass_orders import orders_of
from m6.training.sizes import BUCKET_NUMEL, full_row, scale_batch
from offload import (
    CudaDevice,
    Device,
    DryPass,
    DryRuntime,
    NextWeights,
    OptimizerSettings,
    PlacementConstraints,
    PlacementPlan,
    Rates,
    SimulatedDevice,
    Trace,
    available_bytes,
    in_mib,
    lay_out,
    search_chunk_bytes,
    sizes_of,
    solve,
    staging_bytes,
)

MIB = 2**20
_Number = TypeVar("_Number", int, float)
# Share of a GPU's budget for a plan from the dry trace: the trace sees neither workspaces nor the allocator's rounding.
_DRY_SHARE = 0.9


@dataclass
class OffloadSetup:
    """The arguments of an ``OffloadRuntime``.

    Attributes:
        gradient_dtype: type of stored gradients; None: gradients are not stored.
        next_weights: destination of new weights in delayed updates; None: updates are not delayed.
        learning_rate_scale: the experts' learning rate divided by the learning rate of the other parameters.
        host_budget_bytes: host memory for experts; None: unknown.
        activations: parts of the model with offloaded activations.
        traffic: memory and copies of these activations.
        trace: the dry trace of a step.
        plan: made from the dry trace; None if no plan fits the budget.
        shortage: the reason if no plan fits; otherwise empty.
    """

    device: Device
    dtype: torch.dtype
    gradient_dtype: torch.dtype | None
    next_weights: NextWeights | None
    optimizer: OptimizerSettings
    learning_rate_scale: float
    chunk_bytes: int
    host_budget_bytes: int | None
    constraints: PlacementConstraints
    activations: frozenset[LayerModule]
    traffic: ActivationTraffic
    trace: Trace
    plan: PlacementPlan | None
    shortage: str


def prepare(
    uses: Mapping[str, ExpertUse], config: RunConfig, torch_device: torch.device, sharing: Sharing | None
) -> OffloadSetup:
    """Chooses budgets, chunk size, offloaded activations and a first plan for a model's experts.

    Raises:
        UserError: a budget is too small or unknown.
    """
    settings = config.expert_store
    assert settings is not None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    device = _device(settings, torch_device, world_size)
    # Only on a GPU is there memory outside of the dry trace.
    dry_budget = int((_DRY_SHARE if torch_device.type == "cuda" else 1.0) * device.budget_bytes)
    return plan_offload(uses, config, device, dry_budget, _host_budget(settings, world_size), sharing)


def plan_offload(
    uses: Mapping[str, ExpertUse],
    config: RunConfig,
    device: Device,
    dry_budget: int,
    host_budget_bytes: int | None,
    sharing: Sharing | None,
) -> OffloadSetup:
    """Traces a step, and plans it under the given budgets.

    Args:
        dry_budget: the plan's part of the device's budget, in bytes.
        host_budget_bytes: host memory of this rank; None: unknown.

    Raises:
        UserError: the host's budget is too small for offloaded activations.
    """
    settings = config.expert_store
    assert settings is not None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    stacks = [use.stack(name) for name, use in uses.items()]
    dtype = DTYPES[config.deepspeed.precision]
    # Each layer with shared experts, and each part of a layer's tokens, gives a separate gradient of the same experts.
    parts = config.model.moe_config().exchange_parts(config.m6.training.ep_size)
    several = parts > 1 or any(len(use.layers) > 1 for use in uses.values())
    passes = config.backward_passes(world_size)
    gradient_dtype = gradient_dtype_of(settings, dtype, passes, several)
    next_weights = next_weights_of(config, passes, several)
    optimizer, scale = expert_optimizer(config)
    places = resolve_activation_rules(settings.rules, config.model, config.m6.training.activation_checkpointing)

    def plan_with(activations: frozenset[LayerModule]) -> OffloadSetup:
        if not isinstance(settings.chunk_mib, str):
            chunk_bytes = int(settings.chunk_mib * MIB)
        else:
            best_bytes = search_chunk_bytes(
                stacks,
                dry_trace(config, sharing, dtype, 2**62, activations)[0],  # with chunks of a whole layer
                dry_budget,
                dtype=dtype,
                gradient_dtype=gradient_dtype,
                optimizer=optimizer,
                next_weights=next_weights,
                prefetch_depth=settings.prefetch_depth,
                rates=device.rates,
            )
            # The ranks of a pipeline have different layers, but must reduce gradients in the same chunks.
            chunk_bytes = _minimum_over_ranks(best_bytes, world_size)
        laid_out = lay_out(stacks, chunk_bytes, dtype, gradient_dtype, optimizer, next_weights)
        constraints = _constraints(config, uses, [chunk.stack.name for chunk, _ in laid_out])
        sizes = sizes_of(laid_out)
        trace, traffic = dry_trace(config, sharing, dtype, chunk_bytes, activations)
        for_experts = None if host_budget_bytes is None else host_budget_bytes - traffic.host_bytes
        # The ranks of a pipeline have different activations. If one rank fails, all must: the others would wait for it.
        most = -_minimum_over_ranks(-traffic.host_bytes, world_size)
        if host_budget_bytes is not None and host_budget_bytes < most:
            raise UserError(
                f"m6.offload: the host's budget of {in_mib(host_budget_bytes)} is too small: "
                f"activations alone need {in_mib(most)}"
            )
        # Without a plan the run still starts: the dry trace is only an estimate, and the first step measures.
        plan, shortage = None, ""
        try:
            plan = solve(
                trace,
                sizes,
                dry_budget,
                settings.prefetch_depth,
                device.rates,
                None if for_experts is None else for_experts - staging_bytes(sizes),
                constraints,
            )
        except ValueError as error:
            shortage = describe_shortage(error, config, dtype)
        return OffloadSetup(
            device,
            dtype,
            gradient_dtype,
            next_weights,
            optimizer,
            scale,
            chunk_bytes,
            for_experts,
            constraints,
            activations,
            traffic,
            trace,
            plan,
            shortage,
        )

    # Activations marked "auto" are offloaded only if no plan fits otherwise.
    setup = plan_with(places.host)
    # The ranks of a pipeline have different layers, but must make the same choice.
    all_fit = _minimum_over_ranks(int(setup.plan is not None), world_size) == 1
    return plan_with(places.host | places.auto) if not all_fit and places.auto else setup


def _device(settings: OffloadSettings, torch_device: torch.device, world_size: int) -> Device:
    budget = settings.device_budget_mib
    device: Device
    if torch_device.type == "cuda":
        device = CudaDevice(None if isinstance(budget, str) else int(budget * MIB), torch_device)
    elif not isinstance(budget, str):
        device = SimulatedDevice(int(budget * MIB))
    else:
        raise UserError(
            'm6.offload.device_budget_mib: "auto" is the free memory of a GPU; the simulated device of this machine '
            "needs a number"
        )
    device.budget_bytes = _minimum_over_ranks(device.budget_bytes, world_size)
    # Each rank measures slightly different rates, but ranks with the same experts must make the same plan. The update
    # of an owned chunk sums in another order, and with 16-bit weights a difference in the last bit would persist.
    rates = (device.rates.upload, device.rates.download, device.rates.pageable)
    device.rates = Rates(*(_minimum_over_ranks(rate, world_size) for rate in rates))
    return device


def _host_budget(settings: OffloadSettings, world_size: int) -> int | None:
    """The host memory for each rank: the configured budget, or the rank's share of the available memory.

    None if the available memory is unknown and no budget is configured.

    Raises:
        UserError: the configured budget exceeds the available memory.
    """
    ranks = ranks_per_node(world_size)
    available = available_bytes()
    share = None if available is None else int(0.95 * available) // ranks
    if not isinstance(settings.host_budget_mib, str):
        stated = int(settings.host_budget_mib * MIB)
        if share is not None and stated > share:
            raise UserError(
                f"m6.offload.host_budget_mib {settings.host_budget_mib:g} is more than this host has available for "
                f"each of its {ranks} ranks: {share / MIB:,.0f} MiB"
            )
        share = stated
    # With the same budget all ranks follow the same plan. The collective is also a barrier: every rank reads the
    # available memory before any rank allocates.
    return None if share is None else _minimum_over_ranks(share, world_size)


def _minimum_over_ranks(value: _Number, world_size: int) -> _Number:
    if world_size == 1:
        return value
    values = [value] * world_size
    dist.all_gather_object(values, value)
    return min(values)


def _constraints(config: RunConfig, uses: Mapping[str, ExpertUse], chunk_stacks: list[str]) -> PlacementConstraints:
    """Returns the numbers of the chunks placed by rules. A rule for one layer holds for all layers with its experts."""
    assert config.expert_store is not None
    places = resolve_rules(config.expert_store.rules, config.model, offloads_states(config.deepspeed))

    def chunks(layers: frozenset[int]) -> frozenset[int]:
        stacks = {name for name, use in uses.items() if layers & set(use.layer_indices)}
        return frozenset(number for number, stack in enumerate(chunk_stacks) if stack in stacks)

    constraints = PlacementConstraints(chunks(places.owned), chunks(places.streamed), chunks(places.fetched))
    if constraints.owned & constraints.never_owned:
        raise UserError("m6.offload.rules: layers that share experts in the Pseudo stage need the same place")
    return constraints


def bucket_bytes(config: RunConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of DeepSpeed's bucket for gradients of ``dtype``. A smaller model gets the full size too."""
    if config.deepspeed.zero_stage == 0 or config.pipeline is not None:
        return 0
    section = config.deepspeed.keys["zero_optimization"]
    return int(section.get("reduce_bucket_size", BUCKET_NUMEL)) * dtype.itemsize


def describe_shortage(error: ValueError, config: RunConfig, dtype: torch.dtype) -> str:
    """Returns the message for a too small budget, with DeepSpeed's bucket: it may be the largest part."""
    size = bucket_bytes(config, dtype) if "the device's budget" in str(error) else 0
    return f"{error}, with {in_mib(size)} of DeepSpeed's zero_optimization.reduce_bucket_size" if size else str(error)


@dataclass(frozen=True)
class ActivationTraffic:
    """Memory and copies of offloaded activations.

    Attributes:
        host_bytes: host memory of the activations.
        downloaded_bytes, uploaded_bytes: bytes copied from and to the device in a step.
    """

    host_bytes: int = 0
    downloaded_bytes: int = 0
    uploaded_bytes: int = 0


def dry_trace(
    config: RunConfig,
    sharing: Sharing | None,
    dtype: torch.dtype,
    chunk_bytes: int,
    activations: Collection[LayerModule],
) -> tuple[Trace, ActivationTraffic]:
    """Runs one step of this rank's model on fake tensors, with rows without padding.

    The trace's non-model memory counts weights, gradients and activations from their allocation on. It always includes
    the optimizer state of all parameters except experts, and DeepSpeed's reduction bucket.

    Args:
        chunk_bytes: size of chunks.
        activations: parts of the model with offloaded activations.

    Returns:
        the trace of all micro-batches of the step, and the traffic of activations.
    """
    shape = scale_batch(full_row(config), config.deepspeed.micro_batch_size)

    class WorldMeter:
        def __init__(self, world: FakeWorld) -> None:
            self._world = world

        @property
        def total(self) -> int:
            return self._world.total

        def take_peak(self) -> int:
            peak = self._world.peak
            self._world.restart_peak()
            return peak

    model, dims = model_of_rank(config, sharing), own_dims(config)
    uses = experts_of(model)
    experts = {parameter for use in uses.values() for parameter in use.experts.parameters()}
    constant = state_bytes(model, config, dims.dp, elsewhere=experts) + bucket_bytes(config, dtype)
    with fake_tensors() as world:
        stacks = [use.stack(name) for name, use in uses.items()]
        at_once = config.m6.training.overlap_micro_batches
        dry = DryRuntime(stacks, dtype, chunk_bytes, WorldMeter(world), constant, at_once)
        for name, use in uses.items():
            stream(use, dry, name)
        offload_activations(model, dry.activations, activations)
        model.to_empty(device="cpu")
        model.tie_weights()
        torch.nn.Module.to(model, dtype)
        model.train()
        batch = fake_batch(config, shape, world)
        # The second pass differs from the first, because gradients exist already. All later passes equal the second.
        passes = config.backward_passes(dims.world_size)
        traced = min(2, passes) if config.pipeline is None else passes
        if config.pipeline is not None:
            run_pipeline(model, config, dims, batch, dry, repeats=not activations)
        elif at_once > 1:
            for _ in range(traced):
                run_interleaved(model, at_once, batch)
        else:
            for _ in range(traced):
                output = model(**batch.model_inputs(), labels=batch.labels, return_logits=False)
                (output.target_losses.sum() + output.aux_loss).backward()
                del output
        trace = dry.trace()
        saved = dry.activations
        down, up = (passes * number // traced for number in (saved.downloaded_bytes, saved.uploaded_bytes))
        traffic = ActivationTraffic(saved.host_bytes, down, up)
        return trace.repeat_last(len(trace.moments) // 2, passes - traced), traffic


def model_of_rank(config: RunConfig, sharing: Sharing | None) -> M6ForConditionalGeneration:
    """Builds this rank's part of the model on the meta device.

    Args:
        sharing: the shared layers of the Pseudo phase; None: no layers are shared.
    """
    model = build_meta_model(config, sharing)
    if config.m6.training.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.pipeline is not None:
        keep_layers(model, config.pipeline.layers_of(own_dims(config).pp_rank, config.model.num_layers))
    return model


def own_dims(config: RunConfig) -> ParallelDims:
    """Returns the coordinates of this process; without torch.distributed it is the only rank."""
    own = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return ParallelDims.of(config, *own)


def run_interleaved(model: M6ForConditionalGeneration, at_once: int, batch: MicroBatch) -> None:
    """Runs the forward and the backward pass of interleaved micro-batches.

    Args:
        batch: stands for every micro-batch.
    """
    layers = ModelStage.whole(model)
    outputs = layers.forward_interleaved(
        [(batch.model_inputs(), batch.labels)] * at_once, [None] * at_once, torch.device("cpu")
    )
    losses = [loss for output in outputs for loss in (output.target_losses, output.aux_loss) if loss is not None]
    torch.stack([loss.sum() for loss in losses]).sum().backward()


def run_pipeline(
    model: M6ForConditionalGeneration,
    config: RunConfig,
    dims: ParallelDims,
    batch: MicroBatch,
    dry: DryRuntime,
    repeats: bool,
) -> None:
    """Runs the forward and backward passes of a step of a pipeline.

    Args:
        model: with only the layers of this rank.
        batch: stands for every micro-batch.
        repeats: run two micro-batches and repeat the passes of the second for all others. The first differs, because no
            gradients exist before it. Offloaded activations do not allow it: a pass frees memory of the one before.
    """
    settings = config.pipeline
    assert settings is not None
    cut, place = settings.cut(config.model.num_layers), dims.pp_rank
    table = model.model.embeddings.tokens.weight if 0 in settings.stages_of(place) else None
    stages = {number: _stage(model, config, cut[number], table) for number in settings.stages_of(place)}
    micro_batches = config.accumulation_steps(dims.world_size)
    order = orders_of(settings.schedule, settings.num_ranks, micro_batches, settings.stages_per_rank())[place]
    kept: dict[tuple[int, int], list[Tensor]] = {}

    def forward(number: int, micro_batch: int) -> None:
        kept[number, micro_batch] = _forward(stages[number], config, batch)

    def backward(number: int, micro_batch: int) -> None:
        outputs = kept.pop((number, micro_batch))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    done: dict[tuple[bool, int], DryPass] = {}
    for kind, number, micro_batch in order:
        if kind == "weight":  # stages with offloaded experts compute all gradients at once
            continue
        run = forward if kind == "forward" else backward
        if repeats and micro_batch > 1:
            dry.repeat(done[kind == "forward", number])
        else:
            done[kind == "forward", number] = dry.record(partial(run, number, micro_batch))


def _stage(
    model: M6ForConditionalGeneration, config: RunConfig, layers: range, table: nn.Parameter | None
) -> ModelStage:
    if layers.stop == config.model.num_layers and table is None:  # the copy of the first stage's table
        shape = (model.head.rows(config.model), config.model.hidden_size)
        table = nn.Parameter(torch.empty(shape, dtype=next(model.parameters()).dtype))
    return ModelStage(model, layers, table)


def _forward(stage: ModelStage, config: RunConfig, batch: MicroBatch) -> list[Tensor]:
    """Returns the roots of the backward pass: hidden states and the loss of the routers, or the whole loss."""
    hidden_states = None
    if not stage.is_first:
        shape = (*stage.layout.shape(*batch.input_ids.shape), config.model.hidden_size)
        hidden_states = torch.empty(shape, dtype=next(stage.parameters()).dtype, requires_grad=True)
    hidden_states, output = stage(hidden_states, batch.model_inputs(), batch.labels, None)
    assert output.aux_loss is not None
    if output.target_losses is not None:
        return [output.target_losses.sum() + output.aux_loss]
    return [each for each in (hidden_states, output.aux_loss) if each.requires_grad]
