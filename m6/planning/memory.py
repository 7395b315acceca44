"""The bytes that a run needs on its fullest rank, computed before anything is allocated.

Model states are exact: the parameters' shapes come from the model on the meta device, and DeepSpeed 0.19.8's
partitions follow from them (ZeRO, arXiv 1910.02054, section 5). Activations are a formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from m6.config.run import RunConfig, check_world_size
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.parameter_groups import parameter_groups
from m6.model.sharing import Sharing, share_layers
from m6.planning.activations import FP32, Activations, BatchShape, Precision
from moe.layer import MoELayer

_ADAMW_MOMENTS = 2
# DeepSpeed's defaults of keys below zero_optimization.
PERSISTENCE_THRESHOLD = 100_000
MAX_LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes on the fullest rank, in the memory of the device and of the host together.

    Each part is its own maximum, so ``total`` is a bound: gradients fill up while activations are freed. Not
    counted are DeepSpeed's reduction buckets, its fp32 copy of 16-bit gradients during the update, and what the
    allocator does not give back.
    """

    weights: int
    """as the forward pass reads them; at ZeRO stage 3 with as many of the other ranks' as may be gathered"""
    gradients: int
    optimizer_state: int
    """moments and step counters; at ZeRO stages 1 to 3 also the fp32 master weights"""
    activations: int
    """kept by autograd for the backward pass of one micro-batch"""
    loss_backward: int
    """beside all activations, when the backward pass begins"""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + self.activations + self.loss_backward


def predict_memory(
    config: RunConfig, world_size: int, batch: BatchShape, sharing: Sharing | None = None
) -> MemoryPrediction:
    """Predicts the memory of the fullest of ``world_size`` ranks for micro-batches of the shape ``batch``.

    Under expert parallelism every rank is taken to receive as many tokens as it sends. Offloaded experts do not
    count: they have a budget, see ``m6.offload``.

    Args:
        sharing: what the layers share, for the Pseudo model; None: the Real one.

    Raises:
        UserError: ``config`` does not fit ``world_size``.
    """
    check_world_size(config, world_size)
    weights, gradients, optimizer_state = _model_states(config, world_size, Precision.of(config).weights, sharing)
    activations = Activations(config, batch)
    return MemoryPrediction(weights, gradients, optimizer_state, activations.total(), activations.loss_backward())


def describe(prediction: MemoryPrediction) -> str:
    """The prediction in four lines."""
    return "\n".join(
        [
            f"memory of the fullest rank, without buffers of collectives: at most {_mib(prediction.total)}",
            f"  weights {_mib(prediction.weights)}, gradients {_mib(prediction.gradients)}, "
            f"optimizer state {_mib(prediction.optimizer_state)}",
            f"  activations of one micro-batch {_mib(prediction.activations)}",
            f"  gradients of its logits {_mib(prediction.loss_backward)}",
        ]
    )


def _mib(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class _Group:
    """Parameters that DeepSpeed flattens into one buffer and partitions over ``ranks`` ranks."""

    shapes: list[torch.Size]
    ranks: int

    @property
    def numels(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @property
    def partition(self) -> int:
        """Elements of each rank's part at stages 1 and 2, which start at even places."""
        return math.ceil(sum(self.numels) / (2 * self.ranks)) * 2

    def reduced_gradients(self, index: int) -> int:
        """Elements that the rank with part ``index`` holds at stage 2.

        DeepSpeed narrows the gradient of a parameter that lies across a boundary, but keeps its whole storage.
        """
        begin, offset, kept = index * self.partition, 0, 0
        end = begin + self.partition
        for numel in self.numels:
            if offset < end and offset + numel > begin:
                kept += numel
            offset += numel
        return kept + max(0, end - max(begin, offset))


def _model_states(config: RunConfig, world_size: int, width: int, sharing: Sharing | None) -> tuple[int, int, int]:
    """Weights, gradients and optimizer state; ``width`` is the bytes of a weight."""
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    if sharing is not None:
        share_layers(model, sharing)
    if config.offload is not None:
        for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
            del layer.experts
    stage, ep_size = config.deepspeed.zero_stage, config.m6.training.ep_size
    groups = _partitioned_groups(model, ep_size, world_size)
    numel = sum(sum(group.numels) for group in groups)
    frozen = [parameter.numel() for parameter in model.parameters() if not parameter.requires_grad]
    fixed = sum(frozen) * width + sum(buffer.nbytes for buffer in model.buffers())
    if stage == 0:
        moments = [moment_bytes(shape, config.deepspeed.optimizer_type) for group in groups for shape in group.shapes]
        return numel * FP32 + fixed, numel * FP32, sum(moments)
    if stage == 3:
        return _stage_3_states(config, world_size, width, model, groups)
    masters_and_moments = sum(group.partition * (1 + _ADAMW_MOMENTS) + 1 for group in groups) * FP32
    gradients = numel
    if stage == 2:
        gradients = max(
            sum(group.reduced_gradients(rank * group.ranks // world_size) for group in groups)
            for rank in range(world_size)
        )
    weights = sum(group.partition * group.ranks for group in groups)
    return weights * width + fixed, gradients * width, masters_and_moments


def _stage_3_states(
    config: RunConfig, world_size: int, width: int, model: nn.Module, groups: list[_Group]
) -> tuple[int, int, int]:
    def partition(numels: list[int]) -> int:
        return sum(math.ceil(numel / world_size) for numel in numels)

    section = config.deepspeed.keys["zero_optimization"]
    threshold = section.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)
    max_live = section.get("stage3_max_live_parameters", MAX_LIVE_PARAMETERS)
    everything = [parameter.numel() for parameter in model.parameters()]
    persistent = sum(numel for numel in everything if numel <= threshold)
    gathered = persistent + min(sum(everything) - persistent, max_live) if world_size > 1 else 0
    trainable = sum(partition(group.numels) for group in groups)
    weights = (partition(everything) + gathered) * width + sum(buffer.nbytes for buffer in model.buffers())
    return weights, trainable * width, (trainable * (1 + _ADAMW_MOMENTS) + len(groups)) * FP32


def _partitioned_groups(model: nn.Module, ep_size: int, world_size: int) -> list[_Group]:
    """The optimizer's groups, experts apart where they are split over ranks."""
    groups = []
    for group in parameter_groups(model, weight_decay=0.0):
        experts = [p for p in group["params"] if ep_size > 1 and hasattr(p, "num_global_experts")]
        others = [p for p in group["params"] if not any(p is expert for expert in experts)]
        groups.append(_Group([p.shape for p in others], world_size))
        groups.append(_Group([torch.Size((len(p) // ep_size, *p.shape[1:])) for p in experts], world_size // ep_size))
    return [group for group in groups if group.shapes]


def moment_bytes(shape: tuple[int, ...], optimizer_type: str) -> int:
    """Bytes of one unpartitioned parameter's optimizer state, its step counter included."""
    numel = math.prod(shape)
    if optimizer_type == "AdamW":
        elements = _ADAMW_MOMENTS * numel
    elif len(shape) > 1:
        elements = numel // shape[-1] + numel // shape[-2]  # Adafactor: one mean for each row and each column
    else:
        elements = numel
    return (elements + 1) * FP32
