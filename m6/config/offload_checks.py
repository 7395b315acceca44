"""Checks of the section ``m6.offload`` against the rest of a run."""

from __future__ import annotations

from typing import Any

from m6.architecture.settings import ModelSettings
from m6.config.deepspeed import DeepSpeedSettings, split_deepspeed
from m6.config.offload import OffloadRule, OffloadSettings
from m6.config.offload_rules import layer_modules, match_rules, resolve_activation_rules, resolve_rules
from m6.errors import UserError

_HOST = {"device": "cpu", "pin_memory": True}  # copies from and to pinned memory overlap with computation


def check_offload(
    settings: OffloadSettings,
    deepspeed: DeepSpeedSettings,
    model: ModelSettings,
    checkpointing: bool,
) -> None:
    """Checks that the run can be offloaded as the section says.

    Args:
        deepspeed: the settings that ``apply_offload`` returned.
        checkpointing: whether activation checkpointing is on.

    Raises:
        UserError: the section contradicts another setting, or a rule cannot be applied.
    """
    if settings.policy == "deepspeed":
        return
    if model.moe is None:
        raise UserError(
            "m6.offload: only experts are offloaded, but the model is dense; add m6.moe, leave m6.offload out, or use "
            '"policy": "deepspeed"'
        )
    if settings.optimizer is not None:
        settings.optimizer.check()
    resolve_rules(settings.rules, model, dense_states_on_host=offloads_states(deepspeed))
    resolve_activation_rules(settings.rules, model, checkpointing)


def apply_offload(settings: OffloadSettings, deepspeed: DeepSpeedSettings, model: ModelSettings) -> DeepSpeedSettings:
    """Adds DeepSpeed's own offload to its settings, where ``m6.offload`` needs it.

    Raises:
        UserError: ``m6.offload`` and DeepSpeed's keys contradict each other.
    """
    if settings.policy == "deepspeed":
        return _with_deepspeed_offload(settings, deepspeed)
    return deepspeed if model.moe is None else _with_dense_states(settings.rules, model, deepspeed)


def offloads_states(deepspeed: DeepSpeedSettings) -> bool:
    """Whether DeepSpeed keeps the optimizer state on the host."""
    section = deepspeed.keys.get("zero_optimization", {}).get("offload_optimizer") or {}
    return section.get("device", "none") != "none"


def _with_dense_states(
    rules: list[OffloadRule], model: ModelSettings, deepspeed: DeepSpeedSettings
) -> DeepSpeedSettings:
    """Turns on DeepSpeed's offload of the optimizer if the rules place all of its state on the host."""
    dense = {(kind, layer) for kind, layer in layer_modules(model) if kind != "expert"}
    named = {
        (kind, layer)
        for (kind, layer, tensor), (_, place) in match_rules(rules, model).items()
        if tensor == "optimizer_state" and place == "host"
    }
    # The JSON may have turned on DeepSpeed's offload itself.
    if not dense & named or offloads_states(deepspeed):
        return deepspeed
    if dense - named:
        missing = ", ".join(sorted({kind for kind, _ in dense - named}))
        raise UserError(
            "m6.offload.rules: DeepSpeed holds the optimizer state of everything but experts, and offloads all of it "
            f"or none: name every layer of {missing} too, or none of the dense kinds"
        )
    if deepspeed.zero_stage == 0:
        raise UserError(
            "m6.offload.rules: DeepSpeed offloads optimizer state at zero_optimization.stage 1 or 2, found 0"
        )
    section = {**deepspeed.keys["zero_optimization"], "offload_optimizer": _HOST}
    return split_deepspeed({**deepspeed.keys, "zero_optimization": section})


def _with_deepspeed_offload(settings: OffloadSettings, deepspeed: DeepSpeedSettings) -> DeepSpeedSettings:
    for key in sorted(settings.model_fields_set - {"policy"}):
        raise UserError(f'm6.offload.{key}: "policy": "deepspeed" would ignore it; leave out this key or the policy')
    section: dict[str, Any] = deepspeed.keys.get("zero_optimization", {})
    if deepspeed.zero_stage == 0:
        raise UserError('m6.offload: "policy": "deepspeed" needs zero_optimization.stage 1, 2 or 3, found 0')
    for key in ("offload_optimizer", "offload_param"):
        if key in section:
            raise UserError(
                f'zero_optimization.{key}: m6.offload with "policy": "deepspeed" sets it; keep only one of them'
            )
    offload = {"offload_optimizer": _HOST, **({"offload_param": _HOST} if deepspeed.zero_stage == 3 else {})}
    return split_deepspeed({**deepspeed.keys, "zero_optimization": {**section, **offload}})
