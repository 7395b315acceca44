"""DeepSpeed's part of the JSON: its validation, and the values that the trainer reads from it.

DeepSpeed 0.19.8 silently ignores unknown top-level keys, and known keys that do not apply to the run. Here such a key
is an error before anything starts.

DeepSpeed has models of its sections, too. Their import takes seconds and brings torch, and a wrong value is told
before. A test compares both.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from m6.config.deepspeed_ignored import REFUSED, check_accepted, zero_stage
from m6.errors import UserError, nearest
from m6.validation import Section, list_unknown, validate


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


_DYNAMIC_SCALE = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_LARGEST_SCALE_POWER = 62  # DeepSpeed holds the loss scale as an integer, PyTorch as one of 64 bits
_ADAFACTOR_IN_16_BITS = (
    "in 16 bits Adafactor is for offloaded experts alone: set m6.offload.optimizer to Adafactor, and optimizer.type to "
    "AdamW at stage 1 or 2"
)
Rate = Annotated[float, Field(ge=0, lt=1)]


class _OptimizerParams(Section):
    lr: PositiveFloat
    weight_decay: float = Field(0.0, ge=0)


class _AdamWParams(_OptimizerParams):
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class _MuonParams(_AdamWParams):
    momentum: Rate = 0.95
    adamw_lr: PositiveFloat | None = None


class _LambParams(_AdamWParams):
    eps: PositiveFloat = 1e-6


class _LarsParams(_OptimizerParams):
    momentum: Rate = 0.9
    trust_coefficient: PositiveFloat = 0.001


class _AdafactorParams(_OptimizerParams):
    beta2_decay: float = Field(-0.8, le=0)
    clipping_threshold: float = Field(1.0, ge=1)


_OPTIMIZER_PARAMS: dict[str, type[_OptimizerParams]] = {
    "AdamW": _AdamWParams,
    "Adafactor": _AdafactorParams,
    "Muon": _MuonParams,
    "Lamb": _LambParams,
    "Lars": _LarsParams,
}
OPTIMIZERS = tuple(_OPTIMIZER_PARAMS)


class _Optimizer(Section):
    type: str
    params: dict[str, Any]


class _TorchAutocast(Section):
    enabled: bool
    # Not float16, which needs a loss scale: DeepSpeed scales only at stage 0, where our clipping expects no scale.
    dtype: Literal["bfloat16"]
    lower_precision_safe_modules: list[str] = Field(default_factory=list)


class _Aio(Section):
    block_size: PositiveInt = 1
    queue_depth: PositiveInt = 1
    intra_op_parallelism: PositiveInt = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class _Keys(Section):
    """The keys that are accepted and passed on to DeepSpeed."""

    train_batch_size: PositiveInt = Field(le=10**9)
    train_micro_batch_size_per_gpu: PositiveInt = Field(le=10**6)
    gradient_accumulation_steps: PositiveInt | None = None
    gradient_clipping: float = Field(ge=0)
    optimizer: _Optimizer
    # Their fields are validated apart, see ``_sections``.
    fp16: dict[str, Any] = Field(default_factory=dict)
    bf16: dict[str, Any] = Field(default_factory=dict)
    torch_autocast: _TorchAutocast | None = None
    zero_optimization: dict[str, Any] = Field(default_factory=dict)
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None = None
    steps_per_print: PositiveInt | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    comms_logger: dict[str, Any] = Field(default_factory=dict)
    aio: _Aio | None = None

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _is_not_null(cls, value: object) -> object:
        if value is None:
            raise PydanticCustomError("null", "A key that has no value should be left out")
        return value


PASSED_ON = frozenset(_Keys.model_fields)


class DeepSpeedSettings(BaseModel):
    """The validated keys of DeepSpeed, and the values that the trainer reads from them.

    Attributes:
        micro_batch_size: samples of one forward pass of a rank.
        stated_accumulation: ``gradient_accumulation_steps`` of the JSON, if it is there.
        gradient_clipping: largest norm of the gradient; 0: no clipping.
        precision: ``fp32``, ``bf16`` or ``fp16``: the type of the weights in the forward pass.
        zero_stage: of DeepSpeed's engine; 1 instead of 2 where gradients stay whole.
        smallest_loss_scale: below which the loss scale of fp16 does not fall; 1 in other precisions.
        optimizer_params: the optimizer's parameters, including defaults.
        keys: all keys as they are in the JSON.
    """

    model_config = ConfigDict(frozen=True)

    train_batch_size: int
    micro_batch_size: int
    stated_accumulation: int | None
    gradient_clipping: float
    zero_stage: int
    precision: str
    smallest_loss_scale: float
    optimizer_type: str
    optimizer_params: dict[str, Any]
    keys: dict[str, Any]

    @property
    def product_dtype(self) -> str:
        """The type in which matrices are multiplied: ``precision``, or ``bf16`` under autocast."""
        return "bf16" if self.keys.get("torch_autocast", {}).get("enabled") else self.precision

    def check_accumulation(self, shares: Sequence[int]) -> None:
        """Raises UserError if the JSON states another number of micro-batches than that of each rank in ``shares``."""
        if self.stated_accumulation is not None and set(shares) != {self.stated_accumulation}:
            raise UserError(
                f"gradient_accumulation_steps {self.stated_accumulation} contradicts train_batch_size "
                f"{self.train_batch_size} / ({self.micro_batch_size} x {len(shares)} ranks) = "
                f"{' or '.join(map(str, sorted(set(shares))))}; leave it out"
            )

    def at_stage_1(self) -> DeepSpeedSettings:
        """The same settings at ZeRO stage 1, where gradients stay whole until the end of a step."""
        zero = {**self.keys["zero_optimization"], "stage": 1}
        return self.model_copy(update={"zero_stage": 1, "keys": {**self.keys, "zero_optimization": zero}})

    def engine_config(self, micro_batches: int, replicas: int) -> dict[str, Any]:
        """The dictionary for ``deepspeed.initialize``, without the optimizer, which we build ourselves.

        Args:
            micro_batches: of this rank in a step. DeepSpeed believes that all ranks have as many; losses come to it
                already divided by the targets of the whole step, see ``Engine.backward``.
            replicas: ranks that read different micro-batches.
        """
        config = {key: value for key, value in self.keys.items() if key != "optimizer"}
        config["gradient_accumulation_steps"] = micro_batches
        config["train_batch_size"] = micro_batches * self.micro_batch_size * replicas
        config.setdefault("steps_per_print", None)  # no progress lines of DeepSpeed between ours
        if self.zero_stage == 0:
            # At stage 0 our engine clips the gradients: DeepSpeed does not report the norm there, and leaves the
            # experts of other ranks out of it.
            config["gradient_clipping"] = 0.0
        config["zero_allow_untested_optimizer"] = True  # DeepSpeed knows no Muon but its own
        # Keeps PyTorch's optimizer when its state is offloaded to the host.
        config["zero_force_ds_cpu_optimizer"] = False
        return config

    def check_device(self) -> None:
        """Raises UserError if the device of this machine does not support the run's precision."""
        prepare_deepspeed()
        from deepspeed.accelerator import get_accelerator

        device = get_accelerator()
        supported = {"fp16": device.is_fp16_supported, "bf16": device.is_bf16_supported}
        if self.precision in supported and not supported[self.precision]():
            raise UserError(f"{self.precision}.enabled: the {device.device_name()} of this machine does not support it")


def prepare_deepspeed() -> None:
    """Sets the environment variables that DeepSpeed reads when it is imported: the device and its log level."""
    import torch

    # setdefault: a choice by the user wins.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "warning")


def split_deepspeed(keys: dict[str, Any]) -> DeepSpeedSettings:
    """Validates DeepSpeed's keys.

    Raises:
        UserError: a key is unknown, wrong, missing, or would be silently ignored.
    """
    for key in keys:
        check_accepted(key)
    unknown = [key for key in keys if key not in PASSED_ON]  # DeepSpeed itself ignores unknown top-level keys
    if unknown:
        raise UserError(list_unknown(unknown, PASSED_ON | {"m6"}, ""))
    if "gradient_clipping" not in keys:
        raise UserError(
            "gradient_clipping: missing; DeepSpeed's default of 1.0 would clip, so state the value (0: no clipping)"
        )
    settings = validate(_Keys, keys, "")
    # First: at stage 0, the mistake of a key that is misspelt is not its stage.
    known = {*ZeroOptimization.model_fields, *(key.removeprefix("zero_optimization.") for key in REFUSED)}
    if unknown := [key for key in settings.zero_optimization if key not in known]:
        raise UserError(list_unknown(unknown, ZeroOptimization.model_fields, "zero_optimization"))
    stage = zero_stage(settings.zero_optimization)
    sections = _sections(keys)
    precision = _precision(sections, stage, settings.optimizer.type)
    if precision != "fp32" and keys.get("torch_autocast", {}).get("enabled", False):
        raise UserError(f"torch_autocast: is for weights in fp32, and these are in {precision}; leave one of them out")
    optimizer_params = _optimizer_params(settings.optimizer, stage, precision)
    _check_aio(settings, sections.zero_optimization)
    _check_values(settings, sections)
    return DeepSpeedSettings(
        train_batch_size=settings.train_batch_size,
        micro_batch_size=settings.train_micro_batch_size_per_gpu,
        stated_accumulation=settings.gradient_accumulation_steps,
        gradient_clipping=settings.gradient_clipping,
        zero_stage=stage,
        precision=precision,
        smallest_loss_scale=_smallest_loss_scale(sections.fp16),
        optimizer_type=settings.optimizer.type,
        optimizer_params=optimizer_params,
        keys=keys,
    )


def _sections(keys: dict[str, Any]) -> DeepSpeedSections:
    given = {name: keys[name] for name in DeepSpeedSections.model_fields if name in keys}
    for name, section in given.items():
        for key, value in section.items():
            check_accepted(f"{name}.{key}")
            if value == "auto":  # for Hugging Face's Trainer, which fills in the value; DeepSpeed drops the key
                raise UserError(f'{name}.{key}: "auto" would be ignored; write a value, or leave the key out')
    # Not strict, as DeepSpeed: sizes are often written as 5e8.
    return validate(DeepSpeedSections, given, "", strict=False)


def _precision(sections: DeepSpeedSections, stage: int, optimizer_type: str) -> str:
    enabled = [name for name in ("fp16", "bf16") if getattr(sections, name).enabled]
    if len(enabled) == 2:
        raise UserError("fp16.enabled and bf16.enabled are both true; choose one")
    if enabled and stage == 0:
        raise UserError(
            f"{enabled[0]}.enabled needs zero_optimization.stage 1 or more: at stage 0 DeepSpeed does not scale the "
            "loss (fp16) and starts Adam one step late (bf16)"
            f"{f'; {_ADAFACTOR_IN_16_BITS}' if optimizer_type == 'Adafactor' else ''}"
        )
    return enabled[0] if enabled else "fp32"


def _smallest_loss_scale(fp16: FP16) -> float:
    if not fp16.enabled:
        return 1.0
    # A scale other than 0 is constant.
    return float(fp16.loss_scale or fp16.min_loss_scale)


def _optimizer_params(section: _Optimizer, stage: int, precision: str) -> dict[str, Any]:
    if section.type not in OPTIMIZERS:
        raise UserError(f"optimizer.type: unknown optimizer {section.type!r}{nearest(section.type, OPTIMIZERS)}")
    if section.type == "Adafactor" and stage != 0:
        raise UserError(
            f"optimizer.type Adafactor needs zero_optimization.stage 0, found {stage}: ZeRO's flat partition "
            "has no rows and columns, so the second moment would not be factored"
            f"{'' if precision == 'fp32' else f'; {_ADAFACTOR_IN_16_BITS}'}"
        )
    if section.type == "Muon" and stage == 3:
        raise UserError(
            "optimizer.type Muon needs zero_optimization.stage 0, 1 or 2, found 3, where no rank has a whole matrix"
        )
    if section.type in ("Lamb", "Lars") and stage == 3:
        raise UserError(
            f"optimizer.type {section.type} needs zero_optimization.stage 0, 1 or 2, found 3, where no rank finds the "
            "norm of a whole tensor"
        )
    return validate(_OPTIMIZER_PARAMS[section.type], section.params, "optimizer.params").model_dump()


def _check_values(settings: _Keys, sections: DeepSpeedSections) -> None:
    """Raises UserError for values that DeepSpeed accepts here and fails on when it builds its engine."""
    zero, power = sections.zero_optimization, sections.fp16.initial_scale_power
    if zero.allgather_bucket_size % 2:
        raise UserError(
            f"zero_optimization.allgather_bucket_size: expected a multiple of 2, found {zero.allgather_bucket_size}"
        )
    if power > _LARGEST_SCALE_POWER:
        raise UserError(f"fp16.initial_scale_power: expected at most {_LARGEST_SCALE_POWER}, found {power}")
    if sections.fp16.loss_scale:
        for key in [key for key in _DYNAMIC_SCALE if key in settings.fp16]:
            raise UserError(
                f"fp16.{key}: DeepSpeed ignores it with a constant fp16.loss_scale; leave one of them out "
                "(loss_scale 0 is dynamic)"
            )
    if zero.zero_quantized_weights and settings.torch_autocast is not None and settings.torch_autocast.enabled:
        raise UserError("zero_optimization.zero_quantized_weights cannot be combined with torch_autocast; use bf16")


def _check_aio(settings: _Keys, zero: ZeroOptimization) -> None:
    offloads = [section.device for section in (zero.offload_optimizer, zero.offload_param) if section is not None]
    if settings.aio is not None and "nvme" not in offloads:
        raise UserError('aio: DeepSpeed ignores it unless zero_optimization offloads to "device": "nvme"')
