"""Whether micro-batches can take turns in a run: the checks of ``m6.training.micro_batches_at_once``."""

from __future__ import annotations

from m6.architecture.settings import ModelSettings
from m6.config.offload_rules import resolve_activation_rules
from m6.config.sections import M6Settings
from m6.errors import UserError


def check_turns(settings: M6Settings, model: ModelSettings) -> None:
    """Raises UserError if something that the run asks for needs micro-batches one after the other."""
    training, offload = settings.training, settings.offload
    name = f"m6.training.micro_batches_at_once {training.micro_batches_at_once}"
    for key, is_set, reason in (
        (
            f"m6.training.ep_size {training.ep_size}",
            training.ep_size == 1,
            "all experts are on this rank, so that no tokens are on their way; use a larger ep_size",
        ),
        (
            f"m6.moe.overlap_parts {(settings.moe or {}).get('overlap_parts')}",
            settings.moe is not None and model.moe_config().overlap_parts > 1,
            "each of them computes something beside the exchange; use overlap_parts 1",
        ),
        (
            'm6.training.deterministic "any_world"',
            training.deterministic is not None,
            "the gradients of each micro-batch are added up in a tree of their own; leave one of them out",
        ),
        (
            "m6.parallel.pipeline",
            settings.parallel.pipeline is not None,
            "its schedule gives micro-batches their turns; leave one of them out",
        ),
        (
            "m6.parallel.tensor",
            settings.parallel.tensor is not None,
            "its ranks sum up one micro-batch at a time; leave one of them out",
        ),
        (
            'm6.pseudo_to_real.switch "gradient_correlation"',
            settings.pseudo_to_real is not None and settings.pseudo_to_real.switch == "gradient_correlation",
            "it tells the gradients of the layers apart as one micro-batch runs through them; leave one of them out",
        ),
        (
            "m6.training.batch_ramp",
            bool(training.batch_ramp),
            "the number of micro-batches grows with it; leave one of them out",
        ),
    ):
        if is_set:
            raise UserError(f"{name}, {key}: {reason}")
    places = None if offload is None else resolve_activation_rules(offload.rules, model, checkpointing=False)
    if places is not None and places.host | places.auto:
        raise UserError(
            f"{name}, m6.offload.rules: activations are offloaded block by block of one micro-batch; keep them on the "
            "device, or leave one of them out"
        )


def turns_refusal(at_once: int, accumulation: int) -> str | None:
    """Why ``accumulation`` micro-batches of a rank cannot take turns by ``at_once``; None if they can."""
    if accumulation % at_once == 0:
        return None
    fitting = [number for number in range(1, accumulation + 1) if accumulation % number == 0]
    return (
        f"m6.training.micro_batches_at_once {at_once} does not divide the {accumulation} micro-batches of a rank and "
        f"step; use {max(number for number in fitting if number <= at_once)}, or a smaller "
        "train_micro_batch_size_per_gpu"
    )
