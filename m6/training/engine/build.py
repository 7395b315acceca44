"""From a validated configuration to a DeepSpeed engine; the order of the steps is fixed here."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from m6.config.run import RunConfig, check_world_size
from m6.model.initialization import initialize_parameters
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.sharing import Sharing, divide_gradients, share_layers
from m6.runs.processes import Runtime
from m6.training.engine.optimizer import build_optimizer
from m6.training.offloading.experts import OffloadedExperts, offloaded_experts
from moe.expert_parallel import apply_expert_parallelism


def build_model(config: RunConfig, device: torch.device, sharing: Sharing | None = None) -> M6ForConditionalGeneration:
    """The model on ``device``, with this rank's experts only; with ``sharing`` the Pseudo model.

    Offloaded experts are beside it (``offloaded_experts``).

    Meta device -> split the experts -> share -> allocate -> initialise: neither experts of other ranks nor what a
    layer shares are allocated, and since initial values depend on the parameter's name and expert number alone, every
    layout starts equal.
    """
    training = config.m6.training
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    if training.ep_size > 1:
        apply_expert_parallelism(model, training.ep_size)
    if sharing is not None:
        share_layers(model, sharing)
    if config.offload is not None:
        model.offloaded_experts = OffloadedExperts(model, config, device, sharing)  # type: ignore[assignment]
    model.to_empty(device=device)
    model.tie_weights()
    initialize_parameters(model, training.seed)
    if training.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def build_engine(config: RunConfig, runtime: Runtime, sharing: Sharing | None = None) -> Any:
    """The DeepSpeed engine around the model, with the optimizer of the JSON.

    Args:
        sharing: what the layers share: the Pseudo model. None: the Real one.

    Returns:
        ``deepspeed.DeepSpeedEngine``.
    """
    import deepspeed

    check_world_size(config, runtime.world_size)
    model = build_model(config, runtime.device, sharing)
    if sharing is not None and config.m6.pseudo_to_real is not None and config.m6.pseudo_to_real.gradient == "mean":
        divide_gradients(model)
    optimizer = build_optimizer(model, config.deepspeed, config.m6.training.ep_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=config.deepspeed.engine_config(runtime.world_size),
            dist_init_required=False,
        )
    if runtime.world_size == 1 and config.deepspeed.zero_stage == 0:
        # One rank has nothing to average, but DeepSpeed would still copy every gradient twice.
        engine.enable_backward_allreduce = False
    offloaded = offloaded_experts(engine)
    if offloaded is not None and config.deepspeed.zero_stage > 0:
        offloaded.join(engine.optimizer)
    return engine


def release_engine(engine: Any) -> None:
    """Takes an engine apart and frees its weights, gradients and optimizer state.

    Dropping it is not enough: DeepSpeed 0.19.8 keeps a stage-3 engine in caches of its own.
    """
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    offloaded = offloaded_experts(engine)
    if offloaded is not None:
        offloaded.close()
    engine.destroy()
    held: list[Any] = [*engine.module.parameters(), *engine.module.buffers()]
    if stage == 3:
        held += [parameter.ds_tensor for parameter in engine.module.parameters()]
        held += [*zero.fp32_partitioned_groups_flat, *zero.fp16_partitioned_groups_flat]
        held += [zero.lp_param_buffer, zero.grad_partitions_flat_buffer]
    elif stage > 0:
        held += [*zero.single_partition_of_fp32_groups, *zero.bit16_groups_flat]
    base = zero if stage == 0 else zero.optimizer
    for tensor in held:
        if tensor is not None:
            tensor.grad = None
            tensor.data = tensor.new_empty(0)
    base.state.clear()
