"""The model on the meta device, without memory: the start of an engine and of the dry trace of a step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from m6.architecture.sharing import Sharing
from m6.config.run import RunConfig
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.parameters import add_adapters, share_layers


def build_meta_model(
    config: RunConfig, sharing: Sharing | None = None, tensor_group: dist.ProcessGroup | None = None
) -> M6ForConditionalGeneration:
    """Builds this rank's part of the model on the meta device: its own experts only, and shared layers only once.

    Args:
        config: of the run.
        sharing: the shared layers of the Pseudo model; None: the Real model.
        tensor_group: the ranks with the same hidden states. They divide the tokens for the experts among them.
    """
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    if config.m6.moe is not None and (config.m6.training.ep_size > 1 or tensor_group is not None):
        from moe import apply_expert_parallelism

        apply_expert_parallelism(model, config.m6.training.ep_size, same_tokens=tensor_group)
    _add_adapters(model, config)
    if sharing is not None:
        share_layers(model, sharing)
    return model


def count_trained(config: RunConfig) -> tuple[int, int]:
    """Returns the numbers of trained parameters and of parameters without adapters, on all ranks together."""
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    total = sum(parameter.numel() for parameter in model.parameters())
    _add_adapters(model, config)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad), total


def _add_adapters(model: M6ForConditionalGeneration, config: RunConfig) -> None:
    if config.m6.lora is not None:
        lora = config.m6.lora
        add_adapters(model, lora.rank, lora.alpha, lora.dropout, lora.targets)
