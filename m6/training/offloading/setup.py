"""Before any memory is taken: budgets, the dry trace of a step, the size of chunks, and a first plan."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from m6.config.offload import OffloadSettings
from m6.config.offload_checks import offloads_states
from m6.config.offload_rules import LayerModule, resolve_activation_rules, resolve_rules
from m6.config.run import RunConfig
from m6.errors import UserError
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.sharing import Sharing, share_layers
from m6.planning.cost.expert_store import expert_optimizer, gradient_dtype_of
from m6.training.offloading.modules import ExpertUse, experts_of, stream, take_activations
from moe.expert_parallel import apply_expert_parallelism
from offload import (
    CudaDevice,
    Device,
    DryRuntime,
    OptimizerSettings,
    PlacementConstraints,
    PlacementPlan,
    SimulatedDevice,
    Trace,
    available_bytes,
    lay_out,
    search_chunk_bytes,
    sizes_of,
    solve,
    staging_bytes,
)

MIB = 2**20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The rest is for what a trace without memory does not see on a card: workspaces, and what its allocator rounds up.
_DRY_SHARE = 0.9


@dataclass(frozen=True)
class ActivationTraffic:
    """What activations on the host occupy there, and the bytes that a step moves down and up."""

    host_bytes: int = 0
    downloaded_bytes: int = 0
    uploaded_bytes: int = 0


@dataclass
class OffloadSetup:
    """What an ``OffloadRuntime`` is made of.

    Attributes:
        gradient_dtype: None: gradients are not kept.
        learning_rate_scale: the experts' learning rate over that of the rest.
        activations: what of the model keeps them on the host, and ``traffic`` is what that takes.
        host_budget_bytes: for experts.
        trace: the dry one.
        plan: by it; None where no plan meets the budget by it, and ``shortage`` says why.
    """

    device: Device
    dtype: torch.dtype
    gradient_dtype: torch.dtype | None
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
    """Decides everything about the offloading of a model's experts.

    Raises:
        UserError: a budget is too small, or not known.
    """
    settings = config.expert_store
    assert settings is not None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    stacks = [use.stack(name) for name, use in uses.items()]
    dtype = _DTYPES[config.deepspeed.precision]
    shared = any(len(use.layers) > 1 for use in uses.values())
    gradient_dtype = gradient_dtype_of(settings, dtype, config.deepspeed.accumulation_steps(world_size), shared)
    optimizer, scale = expert_optimizer(config)
    device = _device(settings, torch_device, world_size)
    dry_budget = int((_DRY_SHARE if torch_device.type == "cuda" else 1.0) * device.budget_bytes)
    host_budget_bytes = _host_budget(settings, world_size)
    places = resolve_activation_rules(settings.rules, config.model, config.m6.training.activation_checkpointing)

    def plan_with(activations: frozenset[LayerModule]) -> OffloadSetup:
        if not isinstance(settings.chunk_mib, str):
            chunk_bytes = int(settings.chunk_mib * MIB)
        else:
            found = search_chunk_bytes(
                stacks,
                dry_trace(config, sharing, dtype, 2**62, activations)[0],  # a layer is one chunk
                dry_budget,
                dtype=dtype,
                gradient_dtype=gradient_dtype,
                optimizer=optimizer,
                prefetch_depth=settings.prefetch_depth,
                rates=device.rates,
            )
            chunk_bytes = _least(found, world_size)  # ranks measure other rates, but gradients meet chunk by chunk
        laid_out = lay_out(stacks, chunk_bytes, dtype, gradient_dtype, optimizer)
        constraints = _constraints(config, uses, [chunk.stack.name for chunk, _ in laid_out])
        sizes = sizes_of(laid_out)
        trace, traffic = dry_trace(config, sharing, dtype, chunk_bytes, activations)
        for_experts = None if host_budget_bytes is None else host_budget_bytes - traffic.host_bytes
        if for_experts is not None and for_experts < 0:
            raise UserError(
                f"m6.offload: the host's budget of {host_budget_bytes} bytes is too small: activations alone need "
                f"{traffic.host_bytes}"
            )
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
            shortage = str(error)
        return OffloadSetup(
            device,
            dtype,
            gradient_dtype,
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

    setup = plan_with(places.host)
    return plan_with(places.host | places.auto) if setup.plan is None and places.auto else setup


def dry_trace(
    config: RunConfig,
    sharing: Sharing | None,
    dtype: torch.dtype,
    chunk_bytes: int,
    activations: Collection[LayerModule],
) -> tuple[Trace, ActivationTraffic]:
    """One step of this rank by the model's own code over tensors without memory, on rows without padding.

    The tide counts weights, gradients and activations as they come, and the optimizer state of all but experts and
    DeepSpeed's bucket all the time.
    """
    from m6.planning.cost.batch_shape import full_row, scale_batch
    from m6.planning.cost.memory import BUCKET_NUMEL
    from m6.planning.machine.fake_world import FakeWorld, fake_tensors
    from m6.planning.prediction import predict_memory
    from m6.training.fake_batch import fake_batch

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    training, shape = config.m6.training, scale_batch(full_row(config), config.deepspeed.micro_batch_size)

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

    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    if training.ep_size > 1:
        apply_expert_parallelism(model, training.ep_size)
    if sharing is not None:
        share_layers(model, sharing)
    constant = predict_memory(config, world_size, shape, sharing).optimizer_state
    if config.deepspeed.zero_stage > 0:  # DeepSpeed gathers gradients in a bucket of this size whatever the model's
        section = config.deepspeed.keys["zero_optimization"]
        constant += int(section.get("reduce_bucket_size", BUCKET_NUMEL)) * dtype.itemsize
    uses = experts_of(model)
    with fake_tensors() as world:
        stacks = [use.stack(name) for name, use in uses.items()]
        dry = DryRuntime(stacks, dtype, chunk_bytes, WorldMeter(world), constant)
        for name, use in uses.items():
            stream(use, dry, name)
        take_activations(model, dry.activations, activations)
        model.to_empty(device="cpu")
        model.tie_weights()
        torch.nn.Module.to(model, dtype)
        if training.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        batch = fake_batch(config, shape, world)
        # The second micro-batch already has gradients to add to, and all later ones are as it.
        accumulation = config.deepspeed.accumulation_steps(world_size)
        traced = min(2, accumulation)
        for _ in range(traced):
            output = model(**batch.model_inputs(), labels=batch.labels, return_logits=False)
            (output.target_losses.sum() + output.aux_loss).backward()
            del output
        trace = dry.trace()
        found = dry.activations
        down, up = (accumulation * number // traced for number in (found.downloaded_bytes, found.uploaded_bytes))
        traffic = ActivationTraffic(found.host_bytes, down, up)
        return trace.repeat_last(len(trace.moments) // 2, accumulation - traced), traffic


def _device(settings: OffloadSettings, torch_device: torch.device, world_size: int) -> Device:
    budget = settings.device_budget_mib
    device: Device
    if torch_device.type == "cuda":
        device = CudaDevice(None if isinstance(budget, str) else int(budget * MIB), torch_device)
    elif not isinstance(budget, str):
        device = SimulatedDevice(int(budget * MIB))
    else:
        raise UserError(
            'm6.offload.device_budget_mib: "auto" is what is free on a GPU; the simulated device of this machine needs '
            "a number"
        )
    device.budget_bytes = _least(device.budget_bytes, world_size)
    return device


def _host_budget(settings: OffloadSettings, world_size: int) -> int | None:
    """What is available here for a rank, or what the settings say if that is less; None where nobody knows."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
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
    # Ranks that follow one plan have chunks at the same places; also, all have looked before any takes memory.
    return None if share is None else _least(share, world_size)


def _least(value: int, world_size: int) -> int:
    if world_size == 1:
        return value
    found: list[int] = [0] * world_size
    dist.all_gather_object(found, value)
    return min(found)


def _constraints(config: RunConfig, uses: Mapping[str, ExpertUse], chunk_stacks: list[str]) -> PlacementConstraints:
    """Numbers of the chunks of the layers that rules name; where layers share experts, a rule for one is for all."""
    assert config.expert_store is not None
    places = resolve_rules(config.expert_store.rules, config.model, offloads_states(config.deepspeed))

    def chunks(layers: frozenset[int]) -> frozenset[int]:
        stacks = {name for name, use in uses.items() if layers & set(use.layer_indices)}
        return frozenset(number for number, stack in enumerate(chunk_stacks) if stack in stacks)

    constraints = PlacementConstraints(chunks(places.owned), chunks(places.streamed), chunks(places.fetched))
    if constraints.owned & constraints.never_owned:
        raise UserError("m6.offload.rules: layers that share experts in the Pseudo stage have to lie in the same place")
    return constraints
