"""The section ``m6.gradient_delay``: its keys, and what cannot be combined with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from m6.config.deepspeed import DeepSpeedSettings
from m6.errors import UserError
from m6.validation import Section

if TYPE_CHECKING:
    from m6.config.pipeline import PipelineSettings
    from m6.config.sections import M6Settings

FLUSHLESS: Literal["1f1b"] = "1f1b"
"""The schedule that goes on from step to step without a flush."""
_TOLERANT = ("Adafactor", "Muon")
"""Optimizers that lose less by the delay than AdamW, see scripts/experiments/gradient_delay."""


class GradientDelaySettings(Section):
    """Uses each gradient one step late: W(t+1) = W(t) - lr u(g(W(t-1))) (PipeDream-2BW, arXiv 2006.09503). The host
    then updates offloaded experts beside a whole step, and a pipeline goes on from step to step without a flush. It
    changes what is learned."""

    accept_loss: bool = Field(
        False, description="train although the optimizer learns worse with the delay: AdamW, LAMB, LARS, SGD"
    )


def check_gradient_delay(settings: GradientDelaySettings, run: M6Settings, deepspeed: DeepSpeedSettings) -> None:
    """Raises UserError if the run cannot use its gradients one step late, or would learn less and does not say so."""
    for found, reason in _refusals(run, deepspeed):
        if found:
            raise UserError(f"m6.gradient_delay: {reason}, or m6.gradient_delay=null")
    optimizers = {"optimizer.type": deepspeed.optimizer_type}
    if run.offload is not None and run.offload.optimizer is not None:
        optimizers["m6.offload.optimizer.type"] = run.offload.optimizer.type
    intolerant = {key: name for key, name in optimizers.items() if name not in _TOLERANT}
    if intolerant and not settings.accept_loss:
        key, name = next(iter(intolerant.items()))
        raise UserError(
            f'm6.gradient_delay: {key} "{name}" learns worse from gradients that are one step late: AdamW lost 0.19 '
            "nats in runs of 300 steps (scripts/experiments/gradient_delay), Muon 0.11 and Adafactor 0.06; use one of "
            "these two, or accept the loss with m6.gradient_delay.accept_loss=true"
        )
    if settings.accept_loss and not intolerant:
        raise UserError(
            f"m6.gradient_delay.accept_loss: {' and '.join(optimizers.values())} may be late without it, so it has no "
            "effect; leave it out"
        )


def _refusals(run: M6Settings, deepspeed: DeepSpeedSettings) -> list[tuple[bool, str]]:
    return [
        (
            deepspeed.zero_stage == 3,
            "zero_optimization.stage 3 was not tried with late gradients; use stage 0, 1 or 2",
        ),
        (
            "offload_optimizer" in deepspeed.keys.get("zero_optimization", {}),
            "zero_optimization.offload_optimizer has one buffer for gradients in host memory, which those of the next "
            "step overwrite; leave it out, offload experts with m6.offload",
        ),
        (
            run.offload is not None and run.offload.update == "backward",
            'm6.offload.update "backward" keeps no gradient that could wait for a step; use "next_forward"',
        ),
        (
            run.training.deterministic is not None,
            'm6.training.deterministic "any_world" was not tried with late gradients; leave it out',
        ),
        (
            run.communication.compresses,
            f'm6.communication.gradients "{run.communication.gradients}" delays what it does not send, which was not '
            'tried with late gradients; use "all_reduce"',
        ),
        (run.lora is not None, "adapters of m6.lora were not tried with late gradients; leave m6.lora out"),
        *([] if run.parallel.pipeline is None else _refusals_of_pipeline(run.parallel.pipeline, run, deepspeed)),
    ]


def _refusals_of_pipeline(
    pipeline: PipelineSettings, run: M6Settings, deepspeed: DeepSpeedSettings
) -> list[tuple[bool, str]]:
    without_flush = "m6.parallel.pipeline has passes of two steps under way with late gradients"
    return [
        (
            pipeline.schedule != FLUSHLESS,
            f'm6.parallel.pipeline "schedule": "{pipeline.schedule}" ends each step with a flush, so that late '
            f'gradients would gain nothing; use "{FLUSHLESS}"',
        ),
        (
            pipeline.slices is not None,
            f"m6.parallel.pipeline.slices {pipeline.slices}: slices end each step with a flush, so that late gradients "
            "would gain nothing; leave slices out",
        ),
        (
            run.offload is not None,
            f"{without_flush}, but the store of m6.offload has one version of the experts; leave one of them out",
        ),
        (
            deepspeed.precision == "fp16",
            f"{without_flush}, and fp16's loss scale was not tried with it; use bf16",
        ),
        (
            bool((run.moe or {}).get("balance_bias_rate")),
            f"{without_flush}, but m6.moe.balance_bias_rate changes routers between two steps; leave it out",
        ),
        (
            run.pseudo_to_real is not None and run.pseudo_to_real.switch == "loss_plateau",
            f'{without_flush}, but m6.pseudo_to_real.switch "loss_plateau" waits for the loss of each; use "step"',
        ),
    ]
