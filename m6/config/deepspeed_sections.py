"""The sections of DeepSpeed's keys: the fields that are accepted, with the types and bounds of DeepSpeed 0.19.8.

DeepSpeed has such models too. Its import takes seconds and brings torch, and a wrong value is told before. A test
compares both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from m6.validation import Section


def _is_no_bool(value: object) -> object:
    if isinstance(value, bool):  # Python counts True as 1, and so do some of DeepSpeed's models
        raise PydanticCustomError("number", "Input should be a number")
    return value


Integer = Annotated[int, BeforeValidator(_is_no_bool)]
NotNegative = Annotated[Integer, Field(ge=0)]
Positive = Annotated[Integer, Field(gt=0)]


class BF16(Section):
    """``bf16``."""

    enabled: bool = False


class FP16(Section):
    """``fp16``. A ``loss_scale`` of 0 is dynamic."""

    enabled: bool = False
    loss_scale: Annotated[float, BeforeValidator(_is_no_bool)] = Field(0.0, ge=0, allow_inf_nan=False)
    initial_scale_power: Integer = 16
    loss_scale_window: Positive = 1000
    hysteresis: Integer = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Positive = 1


class CommsLogger(Section):
    """``comms_logger``."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: list[str] = Field(default_factory=list)
    verbose: bool = False
    debug: bool = False


class OffloadOptimizer(Section):
    """``zero_optimization.offload_optimizer``."""

    device: Literal["none", "cpu", "nvme"] = "none"
    pin_memory: bool = True


class OffloadParam(OffloadOptimizer):
    """``zero_optimization.offload_param``."""

    nvme_path: Path | None = None
    buffer_count: NotNegative = 5
    buffer_size: NotNegative = 10**8
    max_in_cpu: NotNegative = 10**9


class LeafModule(Section):
    """``zero_optimization.leaf_module``."""

    classes: list[str] | str = Field(default_factory=list)
    names: list[str] | str = Field(default_factory=list)
    name_suffixes: list[str] | str = Field(default_factory=list)


class ZeroOptimization(Section):
    """``zero_optimization``."""

    stage: Literal[0, 1, 2, 3] = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Positive = 5 * 10**8
    use_multi_rank_bucket_allreduce: bool = True
    allgather_bucket_size: NotNegative = 5 * 10**8
    overlap_comm: bool | None = None
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    sub_group_size: NotNegative = 10**9
    stage3_prefetch_bucket_size: NotNegative = 5 * 10**7
    stage3_param_persistence_threshold: NotNegative = 10**5
    stage3_model_persistence_threshold: NotNegative = 2**63 - 1
    stage3_max_live_parameters: NotNegative = 10**9
    stage3_max_reuse_distance: NotNegative = 10**9
    stage3_module_granularity_threshold: Integer = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    leaf_module: LeafModule = LeafModule()


class DeepSpeedSections(Section):
    """The sections of DeepSpeed whose fields are DeepSpeed's own."""

    bf16: BF16 = BF16()
    fp16: FP16 = FP16()
    comms_logger: CommsLogger = CommsLogger()
    zero_optimization: ZeroOptimization = ZeroOptimization()
