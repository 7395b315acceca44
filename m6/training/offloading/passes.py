"""A rank's part of a model, and its passes in a step on fake tensors, in the order of the engine."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.architecture.sharing import Sharing
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.stages import ModelStage, keep_layers
from m6.training.mesh import ParallelDims
from m6.training.meta_model import build_meta_model
from m6.training.pass_orders import orders_of


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


def run_in_turns(model: M6ForConditionalGeneration, at_once: int, batch: MicroBatch) -> None:
    """Runs the forward and the backward pass of interleaved micro-batches.

    Args:
        batch: stands for every micro-batch.
    """
    layers = ModelStage.whole(model)
    outputs = layers.in_turns([(batch.model_inputs(), batch.labels)] * at_once, [None] * at_once, torch.device("cpu"))
    losses = [loss for output in outputs for loss in (output.target_losses, output.aux_loss) if loss is not None]
    torch.stack([loss.sum() for loss in losses]).sum().backward()


def run_pipeline(model: M6ForConditionalGeneration, config: RunConfig, dims: ParallelDims, batch: MicroBatch) -> None:
    """Runs the forward and backward passes of a step of a pipeline.

    Args:
        model: with only the layers of this rank.
        batch: stands for every micro-batch.
    """
    settings = config.pipeline
    assert settings is not None
    cut, place = settings.cut(config.model.num_layers), dims.pp_rank
    table = model.model.embeddings.tokens.weight if 0 in settings.stages_of(place) else None
    stages = {number: _stage(model, config, cut[number], table) for number in settings.stages_of(place)}
    micro_batches = config.accumulation_steps(dims.world_size)
    order = orders_of(settings.schedule, settings.num_ranks, micro_batches, settings.stages_per_rank())[place]
    kept: dict[tuple[int, int], list[Tensor]] = {}
    for kind, number, micro_batch in order:
        if kind == "forward":
            kept[number, micro_batch] = _forward(stages[number], config, batch)
        elif kind != "weight":  # stages with offloaded experts compute all gradients at once
            outputs = kept.pop((number, micro_batch))
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _stage(
    model: M6ForConditionalGeneration, config: RunConfig, layers: range, table: nn.Parameter | None
) -> ModelStage:
    if layers.stop == config.model.num_layers and table is None:  # the copy of the first stage's table
        shape = (config.model.vocab_size, config.model.hidden_size)
        table = nn.Parameter(torch.empty(shape, dtype=next(model.parameters()).dtype))
    return ModelStage(model, layers, table)


def _forward(stage: ModelStage, config: RunConfig, batch: MicroBatch) -> list[Tensor]:
    """Returns the roots of the backward pass: hidden states and the loss of the routers, or the whole loss."""
    hidden_states = None
    if not stage.is_first:
        shape = (*batch.input_ids.shape, config.model.hidden_size)
        hidden_states = torch.empty(shape, dtype=next(stage.parameters()).dtype, requires_grad=True)
    hidden_states, output = stage(hidden_states, batch.model_inputs(), batch.labels, None)
    assert output.aux_loss is not None
    if output.target_losses is not None:
        return [output.target_losses.sum() + output.aux_loss]
    return [each for each in (hidden_states, output.aux_loss) if each.requires_grad]
