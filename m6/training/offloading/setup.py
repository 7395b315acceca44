"""Prepares offloading before memory is allocated: budgets, dry trace of a step, chunk size and first plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from m6.architecture.sharing import Sharing
from m6.config.offload import OffloadSettings
from m6.config.offload_rules import LayerModule, resolve_activation_rules, resolve_rules
from m6.config.run import RunConfig
from m6.config.section_checks import offloads_states
from m6.errors import UserError
from m6.runs.environment import ranks_per_node
from m6.training.offloading.dry_trace import ActivationTraffic, describe_shortage, dry_trace
from m6.training.offloading.modules import ExpertUse
from m6.training.optimizers import DTYPES, expert_optimizer, gradient_dtype_of, next_weights_of
from offload import (
    CudaDevice,
    Device,
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
