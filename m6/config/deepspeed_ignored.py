"""Keys of DeepSpeed that it would ignore in a run: DeepSpeed 0.19.8 does so without a word, here each is an error."""

from __future__ import annotations

from typing import Any

from m6.errors import UserError

_CPU_ADAM = "DeepSpeed accepts it only with its own CPU Adam"
_OWN_CHECKPOINTS = "DeepSpeed's checkpoints are not used; use m6.checkpoint"
_OWN_DATA = "the data pipeline is m6.data"
_OWN_GRADIENTS = "gradients are normalised by the tokens of the global batch"
_OWN_METRICS = "RUN/metrics.jsonl holds every metric"
_SWAPPED_STATE = "the optimizer's state cannot lie on NVMe: our checkpoints do not hold a state that is swapped out"
_UNSUPPORTED = "not supported by the M6 model"

# Keys of DeepSpeed that would be ignored here or would contradict the section "m6", and what to use instead.
REFUSED = {
    "activation_checkpointing": "DeepSpeed does not apply it to the model; use m6.training.activation_checkpointing",
    "amp": "use bf16, fp16 or torch_autocast",
    "bf16.bf16_master_weights_and_grads": _CPU_ADAM,
    "bf16.bf16_optimizer_states": _CPU_ADAM,
    "bf16.check_grad_overflow": "a step with non-finite gradients is always skipped, see m6.training.max_skipped_steps",
    "bf16.immediate_grad_update": "DeepSpeed ignores it at ZeRO stages 1 to 3",
    "checkpoint": "use m6.checkpoint",
    "csv_monitor": _OWN_METRICS,
    "curriculum_learning": _OWN_DATA,
    "data_efficiency": _OWN_DATA,
    "data_types": "gradients have the precision of fp16 or bf16; another type would change DeepSpeed's optimizer",
    "elasticity": "set train_batch_size; the accumulation adapts to the world size",
    "expert_parallel": "use m6.training.ep_size",
    "fp16.auto_cast": "the model casts its inputs itself",
    "fp16.fp16_master_weights_and_grads": _CPU_ADAM,
    "gradient_predivide_factor": _OWN_GRADIENTS,
    "pipeline": "use m6.parallel.pipeline",
    "prescale_gradients": _OWN_GRADIENTS,
    "scheduler": "use m6.schedule",
    "tensor_parallel": _UNSUPPORTED,
    "tensorboard": "use m6.logging.tensorboard",
    "timers": _OWN_METRICS,
    "use_data_before_expert_parallelism": "an expert-parallel group always consists of consecutive ranks",
    "wandb": "use m6.logging.wandb",
    "zero_allow_untested_optimizer": "no optimizer but those above is supported",
    "zero_force_ds_cpu_optimizer": "the optimizers are PyTorch's, not DeepSpeed's for CPUs",
    "zero_optimization.allgather_partitions": "DeepSpeed does not read it",
    "zero_optimization.compute_grad_norm": "the norm is always computed, as a metric and to find non-finite gradients",
    "zero_optimization.cpu_offload": "deprecated; use zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "deprecated; use zero_optimization.offload_param",
    "zero_optimization.cpu_offload_use_pin_memory": "deprecated; use pin_memory in the offload sections",
    "zero_optimization.elastic_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.legacy_stage1": "removed from DeepSpeed",
    "zero_optimization.load_from_fp32_weights": _OWN_CHECKPOINTS,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "it belongs to super_offload",
    "zero_optimization.offload_optimizer.buffer_count": _SWAPPED_STATE,
    "zero_optimization.offload_optimizer.fast_init": _SWAPPED_STATE,
    "zero_optimization.offload_optimizer.nvme_path": _SWAPPED_STATE,
    "zero_optimization.offload_optimizer.pipeline_read": _SWAPPED_STATE,
    "zero_optimization.offload_optimizer.pipeline_write": _SWAPPED_STATE,
    "zero_optimization.offload_optimizer.ratio": _CPU_ADAM,
    "zero_optimization.offload_optimizer.super_offload": "it keeps the optimizer's state in its own process, which "
    "our checkpoints cannot read",
    "zero_optimization.override_module_apply": "it acts only where DeepSpeed builds the model itself",
    "zero_optimization.pipeline_loading_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "it belongs to the optimizer Muon",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.zenflow": "our checkpoints cannot hold its state",
    "zero_optimization.zero_hpz_partition_size": "its second copy of the weights, made when the engine is built, would "
    "keep the initial weights when a checkpoint is loaded",
}

# Keys of zero_optimization that stages 0 to 2 ignore, in addition to those that begin with stage3_.
_STAGE_3_ONLY = {
    "offload_param", "sub_group_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients", "memory_efficient_linear", "log_trace_cache_warnings", "enable_sanity_checks",
    "leaf_module",
}  # fmt: skip
# Keys of zero_optimization that stage 3 ignores.
_STAGES_1_2_ONLY = {
    "use_multi_rank_bucket_allreduce", "allgather_bucket_size", "ignore_unused_parameters", "round_robin_gradients",
    "parameter_alignment",
}  # fmt: skip
# Keys of offload_param that have a meaning on NVMe alone.
_NVME_ONLY = {"nvme_path", "buffer_count", "buffer_size", "max_in_cpu"}


def check_accepted(key: str) -> None:
    """Raises UserError for a key of ``REFUSED``."""
    if key in REFUSED:
        raise UserError(f"{key}: not used here: {REFUSED[key]}")


def zero_stage(section: dict[str, Any]) -> int:
    """The ZeRO stage; UserError if the stage ignores a key of the section."""
    stage = section.get("stage", 0)
    # Not isinstance: a bool is an int, and ``true`` must not mean stage 1.
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise UserError(f"zero_optimization.stage: expected 0, 1, 2 or 3, found {stage!r}")
    for key in section:
        if needed := _needed_stage(key, stage):
            raise UserError(f"zero_optimization.{key}: DeepSpeed ignores it at stage {stage}; it needs {needed}")
    offload = section.get("offload_optimizer")
    if isinstance(offload, dict):
        for key in offload:
            check_accepted(f"zero_optimization.offload_optimizer.{key}")
        if offload.get("device") == "nvme":
            raise UserError(
                f'zero_optimization.offload_optimizer.device: "nvme" is not used here: {_SWAPPED_STATE}; use "cpu"'
            )
    if isinstance(section.get("offload_param"), dict):
        _check_nvme_keys(section["offload_param"])
    return stage


def without_ignored(section: dict[str, Any], stage: int) -> dict[str, Any]:
    """The keys of zero_optimization that do something at a stage."""
    return {key: value for key, value in section.items() if not _needed_stage(key, stage)}


def _needed_stage(key: str, stage: int) -> str:
    """The stages that a key of zero_optimization needs, if ``stage`` ignores it; otherwise empty."""
    if f"zero_optimization.{key}" in REFUSED or key == "stage":
        return ""
    if stage < 3 and (key in _STAGE_3_ONLY or key.startswith("stage3_")):
        return "stage 3"
    if stage == 3 and key in _STAGES_1_2_ONLY:
        return "stage 1 or 2"
    return "stage 1 or more" if stage == 0 else ""


def _check_nvme_keys(section: dict[str, Any]) -> None:
    device = section.get("device", "none")
    for key in sorted(_NVME_ONLY & section.keys()):
        if device != "nvme":
            raise UserError(
                f'zero_optimization.offload_param.{key}: DeepSpeed ignores it with "device": "{device}"; '
                'it needs "nvme"'
            )
    if device == "nvme" and not section.get("nvme_path"):
        raise UserError(
            'zero_optimization.offload_param.nvme_path: missing; "device": "nvme" needs a folder for its files'
        )
