"""Builds the model, the optimizer and the engine from a validated configuration.

What only some runs need is imported where it is chosen.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

import torch

from m6.architecture.sharing import Sharing
from m6.config.checks import check_world_size
from m6.config.run import RunConfig
from m6.model.initialization import initialize_parameters
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.parameters import divide_gradients
from m6.model.stages import keep_layers
from m6.model.tensor import divide_layers
from m6.runs.processes import Runtime
from m6.training.engine.engine import Engine
from m6.training.engine.optimizer import build_optimizer, follow_partitions
from m6.training.engine.runner import PlainRunner
from m6.training.mesh import Mesh, ParallelDims
from m6.training.meta_model import build_meta_model
from moe import MoELayer

if TYPE_CHECKING:
    from m6.training.offloading.experts import OffloadedExperts


def build_model(
    config: RunConfig,
    device: torch.device,
    sharing: Sharing | None = None,
    mesh: Mesh | None = None,
) -> tuple[M6ForConditionalGeneration, OffloadedExperts | None]:
    """Builds this rank's part of the model on ``device``.

    The order is: build on the meta device, split the experts over the ranks, share layers, drop the layers of other
    ranks, divide matrices, allocate, initialize. Parts of other ranks and copies of shared layers are thus never
    allocated. Initial values depend only on the parameter's name and the expert's number, so every layout starts with
    the same model.

    Args:
        sharing: the shared layers of the Pseudo model; None: the Real model.
        mesh: of this rank; None: this rank has the whole model, except experts of other ranks.

    Returns:
        the model, and its offloaded experts, if the run offloads them.
    """
    training = config.m6.training
    model = build_meta_model(config, sharing, None if mesh is None else mesh.tensor)
    if training.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if mesh is not None and config.pipeline is not None:
        # After the split of experts: all ranks make its groups, also ranks without a layer of experts.
        keep_layers(model, config.pipeline.layers_of(mesh.dims.pp_rank, config.model.num_layers))
    if mesh is not None and mesh.is_divided:
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                layer.balance_group = mesh.replicas
    if mesh is not None and config.tensor is not None:
        groups = mesh.dims.ranks("tp")
        divide_layers(
            model,
            config.model,
            config.tensor.placement,
            groups,
            mesh.dims.rank,
            mesh.own_group,
            config.tensor.sequence_parallel,
        )
    replicas = None if mesh is None else mesh.replicas
    offloaded = None
    if config.expert_store is not None:
        from m6.training.offloading.experts import OffloadedExperts

        offloaded = OffloadedExperts(model, config, device, sharing, replicas)
    model.to_empty(device=device)
    model.tie_weights()
    initialize_parameters(model, training.seed)
    return model, offloaded


def build_engine(
    config: RunConfig, runtime: Runtime, sharing: Sharing | None = None, plain: type[PlainRunner] = PlainRunner
) -> Engine:
    """Builds the model, the optimizer and the engine around them.

    Args:
        sharing: as in ``build_model``.
        plain: the runner of whole models; a measurement may have its own.

    Raises:
        UserError: the run does not fit the number of ranks, or a memory budget is too small.
    """
    import deepspeed

    check_world_size(config, runtime.world_size)
    dims = ParallelDims.of(config, runtime.rank, runtime.world_size)
    if config.pipeline is not None:
        # If the rank fails or hangs, its log names its part of the model.
        stages = config.pipeline.describe_rank(dims.pp_rank, config.model.num_layers)
        print(f"place: rank {runtime.rank}, pipeline {dims.dp_rank}, {stages}", file=sys.stderr, flush=True)
    mesh = Mesh(dims, runtime.device)
    mpu = mesh.install()
    model, offloaded = build_model(config, runtime.device, sharing, mesh)
    if sharing is not None and config.m6.pseudo_to_real is not None and config.m6.pseudo_to_real.gradient == "mean":
        divide_gradients(model)
    fused = config.m6.training.deterministic is None or runtime.device.type != "cpu"
    optimizer = build_optimizer(model, config.deepspeed, fused)
    own_share = config.batch_split(runtime.world_size).shares(config.deepspeed.train_batch_size)[dims.dp_rank]
    deepspeed_config = config.deepspeed.engine_config(own_share, dims.dp)
    if config.m6.communication.compresses:
        deepspeed_config["communication_data_type"] = "fp32"  # also in steps without compression
    # DeepSpeed's initialization prints warnings about unused features.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initialized, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=deepspeed_config,
            mpu=mpu,
            dist_init_required=False,
        )
    if config.deepspeed.zero_stage > 0:
        follow_partitions(optimizer, initialized.optimizer, model, config.deepspeed)
    if runtime.world_size == 1 and config.deepspeed.zero_stage == 0:
        # With one rank there is nothing to average, but DeepSpeed would still copy every gradient twice.
        initialized.enable_backward_allreduce = False
    return Engine(initialized, config, mesh, offloaded, sharing, plain)
