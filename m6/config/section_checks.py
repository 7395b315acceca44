"""What sections of a run's JSON ask of each other, and of DeepSpeed's keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from m6.architecture.settings import ModelSettings
from m6.architecture.sharing import Sharing
from m6.config.batch_ramp import BatchSizes
from m6.config.deepspeed import DeepSpeedSettings, split_deepspeed
from m6.config.elastic import FIXED_SUMS, ElasticSettings
from m6.config.offload import OffloadRule, OffloadSettings
from m6.config.offload_rules import layer_modules, match_rules, resolve_activation_rules, resolve_rules
from m6.config.pipeline import PipelineSettings, equal_sizes
from m6.config.sections import GradientDelaySettings, LoraSettings, M6Settings, PseudoToRealSettings, ScheduleSettings
from m6.data.objectives import OBJECTIVES, is_in_place, reads_codes
from m6.errors import UserError

_TOLERANT = ("Adafactor", "Muon")
"""Optimizers that lose less by the delay than AdamW, see scripts/experiments/gradient_delay."""


def check_overlap(settings: M6Settings, deepspeed: DeepSpeedSettings, model: ModelSettings) -> None:
    """Raises UserError if parts of an exchange have no token each."""
    parts = model.moe_config().exchange_parts(settings.training.ep_size)
    length, rows = settings.data.sequence_length, deepspeed.micro_batch_size
    tokens = "one token" if rows * length == 1 else f"{rows * length} tokens"
    if parts > rows * length:
        raise UserError(
            f"m6.moe.overlap_parts {parts}: a micro-batch of train_micro_batch_size_per_gpu {rows} x "
            f"m6.data.sequence_length {length} has at most {tokens}, too few for one in each part; use "
            f"train_micro_batch_size_per_gpu {-(-parts // length)} or more, or overlap_parts {rows * length}"
        )


def check_batch_ramp(settings: M6Settings, deepspeed: DeepSpeedSettings) -> None:
    """Raises UserError if the stages of batches do not fit the run."""
    BatchSizes(settings.training.batch_ramp, deepspeed.train_batch_size).check_ramp(settings.training.total_steps)


def check_schedule(schedule: ScheduleSettings, total: int) -> None:
    """Raises UserError if the schedule is longer than the run's ``total`` steps, or ignores one of its keys."""
    room = total - (schedule.decay_steps(total) if schedule.decay_share is not None else 0)
    if schedule.warmup_steps > room:
        decay = f" and a decay of {total - room} steps, decay_share {schedule.decay_share:g}," if room < total else ""
        raise UserError(
            f"m6.schedule: warmup_steps {schedule.warmup_steps}{decay} exceed m6.training.total_steps {total}; "
            f"set m6.schedule.warmup_steps=0 to {room}, or more m6.training.total_steps"
        )
    if (schedule.decay == "wsd") != (schedule.decay_share is not None):
        raise UserError(
            f'm6.schedule.decay_share belongs to "decay": "wsd" and is required there; decay is "{schedule.decay}"'
        )
    for key, has_effect in (
        ("power", schedule.decay == "polynomial"),
        ("final_lr_ratio", schedule.decay != "constant"),
    ):
        if key in schedule.model_fields_set and not has_effect:
            raise UserError(f'm6.schedule.{key}: "decay": "{schedule.decay}" ignores it; leave it out')


def check_lora(settings: LoraSettings, model: ModelSettings, run: M6Settings) -> None:
    """Raises UserError if adapters have no trained weights under them, or no target among the model's parts."""
    if run.init is None:
        raise UserError("m6.lora: adapters belong to weights that are trained already; use m6 finetune with --init")
    if "dense" in settings.targets and model.num_moe_layers == model.num_layers:
        raise UserError('m6.lora.targets: "dense", but the feed-forwards of all layers are experts; use "experts"')
    if "experts" in settings.targets and not model.num_moe_layers:
        raise UserError('m6.lora.targets: "experts", but the model is dense; use "dense"')
    if "experts" not in settings.targets and run.training.ep_size > 1:
        # DeepSpeed 0.19.8 demands a trained expert on each rank where experts are divided.
        raise UserError(
            f'm6.lora.targets: m6.training.ep_size is {run.training.ep_size}, which needs "experts" among them'
        )


def check_elastic(settings: ElasticSettings, run: M6Settings, deepspeed: DeepSpeedSettings) -> None:
    """Raises UserError if a new number of ranks could not keep what other sections fix."""
    if "gradient_accumulation_steps" in deepspeed.keys:
        raise UserError(
            "gradient_accumulation_steps: with m6.elastic it follows from the batch sizes and the ranks of each "
            "attempt; leave it out"
        )
    if run.parallel.shares is not None:
        raise UserError(
            "m6.parallel.shares: with m6.elastic each attempt divides the batch equally over nodes of one type; leave "
            "one of them out"
        )
    for name in FIXED_SUMS:
        if run.training.deterministic is not None and name in (settings.may_change or ()):
            raise UserError(
                f'm6.elastic.may_change: "{name}" changes the sums that m6.training.deterministic "any_world" keeps; '
                "leave it out"
            )


def check_pictures(settings: M6Settings) -> None:
    """Raises UserError if drawing is trained without image codes, or asked for without being trained."""
    drawing = [name for name in OBJECTIVES if reads_codes(name)]
    trained = [name for name in drawing if settings.objectives.of(name).weight > 0]
    if trained and settings.data.image_tokenizer is None:
        raise UserError(f"m6.objectives.{trained[0]} needs m6.data.image_tokenizer, whose codes it learns to generate")
    if settings.data.image_tokenizer is not None and not trained:
        raise UserError(
            f"m6.data.image_tokenizer: only m6.objectives.{' and '.join(drawing)} read image codes, and their weights "
            "are 0; give one a weight, or leave the image tokenizer out"
        )
    if settings.samples is not None and not trained:
        raise UserError(
            f"m6.samples: only a model with m6.objectives.{' or '.join(drawing)} draws pictures; their weights are 0"
        )


# Keys of m6.pseudo_to_real that belong to one rule of the switch.
_SWITCH_KEYS = {
    "plateau_window_steps": "loss_plateau",
    "plateau_improvement": "loss_plateau",
    "correlation_threshold": "gradient_correlation",
    "correlation_checks": "gradient_correlation",
}


def check_pseudo_to_real(settings: PseudoToRealSettings, model: ModelSettings, run: M6Settings) -> None:
    """Raises UserError if the section contradicts itself, the model or the rest of the run."""
    total_steps = run.training.total_steps
    if settings.switch_step >= total_steps:
        raise UserError(
            f"m6.pseudo_to_real.switch_step {settings.switch_step} is not before the end of the run, "
            f"m6.training.total_steps {total_steps}: no step would be left for the Real model; set "
            f"m6.pseudo_to_real.switch_step=1 to {total_steps - 1}, or m6.pseudo_to_real=null"
        )
    if (settings.learning_rate == "rewarm") != (settings.rewarm_steps is not None):
        raise UserError(
            'm6.pseudo_to_real.rewarm_steps belongs to "learning_rate": "rewarm" and is required there; '
            f'learning_rate is "{settings.learning_rate}"'
        )
    for key, switch in _SWITCH_KEYS.items():
        if key in settings.model_fields_set and settings.switch != switch:
            raise UserError(
                f'm6.pseudo_to_real.{key}: "switch": "{settings.switch}" ignores it; it belongs to "{switch}"'
            )
    try:
        settings.sharing(model.num_layers).check(model)
    except UserError as error:
        raise UserError(f"m6.pseudo_to_real: {error}") from None


def check_gradient_delay(settings: GradientDelaySettings, run: M6Settings, deepspeed: DeepSpeedSettings) -> None:
    """Raises UserError if the run would learn less from late gradients and does not say so."""
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


def check_pipeline(pipeline: PipelineSettings, run: M6Settings, model: ModelSettings) -> None:
    """Raises UserError if the stages do not fit the model, or rows have no place to be cut."""
    pipeline.check_cut(model.num_layers)
    if run.offload is not None:
        pipeline.check_experts(model)
    if run.lora is not None:
        pipeline.check_adapters(run.lora.targets, model)
    if pipeline.slices is not None:
        check_slices(pipeline.slices, run)


def check_slices(slices: int | str, run: M6Settings) -> None:
    """Raises UserError if rows cannot be cut.

    Args:
        slices: a number, or "auto".
    """
    name, length = f"m6.parallel.pipeline.slices {slices}", run.data.sequence_length
    if isinstance(slices, int) and slices > length:
        raise UserError(
            f"{name}: a row of m6.data.sequence_length {length} tokens has at most {length} slices; use {length}"
        )
    trained = [each for each in OBJECTIVES if run.objectives.of(each).weight > 0]
    if trained and not run.data.packing and all(map(is_in_place, trained)):
        raise UserError(
            f"{name}: a row can be cut between packed samples and inside of targets that are read from left to right, "
            f"but rows of {length} tokens have one sample (m6.data.packing=false), and all of m6.objectives, "
            f"{', '.join(trained)}, predict targets in place: 0 places; set m6.data.packing=true, or leave slices out"
        )


def keeps_groups(stages: Sequence[range], sharing: Sharing) -> bool:
    """Whether each of these stages has whole groups of layers that share weights."""
    return not any(_divides_group(stage.start, sharing) or _divides_group(stage.stop, sharing) for stage in stages)


def cut_between_groups(num_stages: int, sharing: Sharing) -> list[int] | None:
    """The number of layers of each stage, with equal numbers of groups as far as possible; None for too few groups."""
    if num_stages > sharing.num_groups:
        return None
    groups = iter(sharing.group_sizes)
    return [sum(itertools.islice(groups, number)) for number in equal_sizes(sharing.num_groups, num_stages)]


def check_sharing(pipeline: PipelineSettings, sharing: Sharing) -> None:
    """Raises UserError if layers that share weights are in several stages."""
    stages = pipeline.cut(sharing.num_layers)
    if keeps_groups(stages, sharing):
        return
    boundary = next(stage.stop for stage in stages if _divides_group(stage.stop, sharing))
    layers = cut_between_groups(len(stages), sharing)
    advice = f'"layers": {layers}' if layers is not None else f"m6.pseudo_to_real.num_groups {_groups(stages, sharing)}"
    raise UserError(
        f"m6.parallel.pipeline: layers {boundary - 1} and {boundary} share weights in the Pseudo stage "
        f"(m6.pseudo_to_real.num_groups {sharing.num_groups}), but are in different stages; layers that share weights "
        f"must be in one stage: use {advice}"
    )


def _divides_group(layer: int, sharing: Sharing) -> bool:
    """Whether a boundary before ``layer`` lies inside a group."""
    return 0 < layer < sharing.num_layers and sharing.first_layer(layer) != layer


def _groups(stages: Sequence[range], sharing: Sharing) -> str:
    """The fewest groups of which each stage has whole ones, in words."""
    for number in range(len(stages), sharing.num_layers):
        if keeps_groups(stages, Sharing(sharing.num_layers, number, sharing.parts)):
            return str(number)
    return f"{len(stages)} with other stages, or fewer stages"


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
