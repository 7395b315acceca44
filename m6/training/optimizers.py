"""The sizes of the optimizers of a run, and the bytes of their state on a rank."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from m6.config.offload import MUON_MOMENTUM, OffloadOptimizer, OffloadSettings
from m6.config.run import RunConfig
from m6.config.section_checks import offloads_states
from m6.model.parameters import matrices_of_blocks, parameter_groups
from m6.training.sizes import FP32
from offload import NextWeights, OptimizerSettings

if TYPE_CHECKING:
    from torch import nn

ADAMW_MOMENTS = 2
"""Elements of AdamW's state for each parameter."""
MUON_BATCH_ELEMENTS = 1 << 24
"""Elements of matrices that are made orthogonal at once, unless one matrix has more: it bounds the temporaries."""


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group of one rank's optimizer. DeepSpeed flattens it at ZeRO stages 1 and 2.

    Attributes:
        numel: elements before ZeRO partitions them.
        of_experts: whether it has experts with groups of ranks of their own.
        by_muon: whether Muon updates it.
        moments: elements of optimizer state for each parameter.
    """

    numel: int
    of_experts: bool = False
    by_muon: bool = False
    moments: int = ADAMW_MOMENTS

    def partition(self, ranks: int) -> int:
        """Elements of a rank's partition, one of ``ranks``; partitions begin at even offsets."""
        return math.ceil(self.numel / (2 * ranks)) * 2

    def state(self, numel: int) -> int:
        """Elements of fp32 weights and optimizer state for ``numel`` of its parameters."""
        return 2 * numel if self.by_muon else (1 + self.moments) * numel + 1  # with a step counter


def groups_of(optimizer_type: str, matrices: int, vectors: int, by_muon: int, experts: int = 0) -> list[ParameterGroup]:
    """The optimizer's non-empty parameter groups: with weight decay, without it, and experts.

    Args:
        matrices, vectors, experts: their elements.
        by_muon: elements of ``matrices`` that Muon updates.
    """
    muon = optimizer_type == "Muon"
    blocks = by_muon if muon else 0
    moments = 1 if optimizer_type == "Lars" else ADAMW_MOMENTS
    groups = (
        ParameterGroup(blocks, by_muon=True),
        ParameterGroup(matrices - blocks, moments=moments),
        ParameterGroup(experts, of_experts=True, by_muon=muon, moments=moments),
        ParameterGroup(vectors, moments=moments),
    )
    return [group for group in groups if group.numel > 0]


def moment_bytes(shape: tuple[int, ...], optimizer_type: str, of_blocks: bool) -> int:
    """Bytes of the unpartitioned optimizer state of one parameter, with its step counter.

    Args:
        of_blocks: the parameter is a matrix of a block. Under Muon the others are updated by AdamW.
    """
    numel = math.prod(shape)
    if optimizer_type == "Muon" and of_blocks:
        return numel * FP32  # a momentum and no counter
    if optimizer_type == "Lars":
        elements = numel
    elif optimizer_type in ("AdamW", "Muon", "Lamb"):
        elements = ADAMW_MOMENTS * numel
    elif len(shape) > 1:
        elements = numel // shape[-1] + numel // shape[-2]  # Adafactor: a mean for each row and each column
    else:
        elements = numel
    return (elements + 1) * FP32


def state_bytes(model: nn.Module, config: RunConfig, ranks: int, elsewhere: Set[nn.Parameter] = frozenset()) -> int:
    """Bytes of optimizer state on the device of a rank: fp32 weights with ZeRO, moments, and delayed gradients.

    Args:
        model: the part of the model on this rank.
        ranks: number of ZeRO's partitions of a parameter group.
        elsewhere: parameters with their state in another place.
    """
    settings, late = config.deepspeed, config.m6.gradient_delay is not None
    blocks = matrices_of_blocks(model, config.model)
    matrices, vectors = (
        [parameter for parameter in group["params"] if parameter not in elsewhere]
        for group in parameter_groups(model, weight_decay=0.0)
    )
    if settings.zero_stage == 0:
        trained = [*matrices, *vectors]
        moments = sum(moment_bytes(tuple(each.shape), settings.optimizer_type, each in blocks) for each in trained)
        return moments + late * FP32 * sum(each.numel() for each in trained)
    if offloads_states(settings):
        return 0
    by_muon = [parameter for parameter in matrices if parameter in blocks]
    sizes = (sum(each.numel() for each in part) for part in (matrices, vectors, by_muon))
    groups = groups_of(settings.optimizer_type, *sizes)
    partitions = [group.partition(ranks) for group in groups]
    elements = sum(group.state(part) for group, part in zip(groups, partitions, strict=True))
    return FP32 * (elements + late * sum(partitions))


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The types of weights by the names of a run's precision."""


def gradient_dtype_of(settings: OffloadSettings, dtype: torch.dtype, passes: int, shared: bool) -> torch.dtype | None:
    """The type of gradients on the host: fp32 where several add up, otherwise the type of the weights."""
    if settings.update == "backward":
        return None
    return dtype if passes == 1 and not shared else torch.float32


def next_weights_of(config: RunConfig, passes: int, shared: bool) -> NextWeights | None:
    """Where delayed updates put new weights: in the place of a gradient, or in a copy if gradients add up there."""
    if config.m6.gradient_delay is None:
        return None
    return "gradient" if passes == 1 and not shared else "copy"


def expert_optimizer(config: RunConfig) -> tuple[OptimizerSettings, float]:
    """The experts' optimizer, and its learning rate divided by the learning rate of the other parameters."""
    settings, params = config.expert_store or OffloadSettings(), config.deepspeed.optimizer_params
    own = settings.optimizer
    if own is None:
        own = OffloadOptimizer.model_validate({"type": config.deepspeed.optimizer_type, **params})
    if own.type == "Adafactor":
        decay, threshold = own.beta2_decay, own.clipping_threshold
        made = OptimizerSettings("adafactor", beta2_decay=decay, clipping_threshold=threshold)
    elif own.type == "SGD":
        made = OptimizerSettings("sgd", momentum=own.momentum or 0.0)
    elif own.type == "Muon":
        beta1, beta2 = own.betas
        momentum = MUON_MOMENTUM if own.momentum is None else own.momentum
        rate = (own.adamw_lr or own.lr) / own.lr
        made = OptimizerSettings("muon", beta1, beta2, own.eps, momentum=momentum, vector_rate=rate)
    else:
        beta1, beta2 = own.betas
        made = OptimizerSettings("adamw", beta1=beta1, beta2=beta2, epsilon=own.eps)
    made = replace(made, weight_decay=own.weight_decay, masters=settings.master_weights)
    return made, own.lr / params["lr"]
