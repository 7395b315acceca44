"""How ``m6.offload`` keeps the experts of a run: number formats and optimizer."""

from __future__ import annotations

from dataclasses import replace

import torch

from m6.config.offload import OffloadOptimizer, OffloadSettings
from m6.config.run import RunConfig
from offload import NextWeights, OptimizerSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The types of weights by the names of a run's precision."""


def gradient_dtype_of(settings: OffloadSettings, dtype: torch.dtype, passes: int, shared: bool) -> torch.dtype | None:
    """The type of gradients on the host: fp32 where several add up, otherwise the type of the weights."""
    if settings.update == "backward":
        return None
    return dtype if passes == 1 and not shared else torch.float32


def next_weights_of(config: RunConfig, passes: int, shared: bool) -> NextWeights | None:
    """Where late updates put new weights: in the place of a gradient, or in a copy if gradients add up there."""
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
        made = OptimizerSettings("sgd", momentum=own.momentum)
    else:
        beta1, beta2 = own.betas
        made = OptimizerSettings("adamw", beta1=beta1, beta2=beta2, epsilon=own.eps)
    made = replace(made, weight_decay=own.weight_decay, masters=settings.master_weights)
    return made, own.lr / params["lr"]
