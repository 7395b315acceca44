"""Checks whether this machine meets the needs of a run's JSON, before anything is written."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import torch

from m6.config.deepspeed import DeepSpeedSettings, prepare_deepspeed
from m6.config.run import RunConfig
from m6.errors import UserError
from m6.model.patch_encoders import check_patch_encoder
from m6.runs.environment import is_main_of_environment
from m6.runs.processes import own_device
from m6.runs.trackers import check_trackers

_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_NOT_IMPLEMENTED = "deepspeed_not_implemented"  # DeepSpeed 0.19.8 has this operator in place of a missing one


def check_machine(config: RunConfig) -> None:
    """Checks precision, operators of DeepSpeed, folders, packages and credentials.

    Raises:
        UserError: one of them is missing here; the message names the key that asks for it.
    """
    config.deepspeed.check_device()
    _check_kernels()
    _check_operators(config.deepspeed)
    for name in config.deepspeed.keys.get("torch_autocast", {}).get("lower_precision_safe_modules", []):
        _check_module(name)
    check_trackers(config.m6.logging, with_credentials=is_main_of_environment())
    check_patch_encoder(config.model.patch_encoder)
    if config.m6.lora is not None and importlib.util.find_spec("peft") is None:
        raise UserError("m6.lora needs the package peft, which is not installed; pip install 'm6-recipes[huggingface]'")


def _check_kernels() -> None:
    if torch.cuda.is_available():
        card = own_device()
        from m6.runs.cards import lacking_kernels

        problem = lacking_kernels(torch.cuda.get_device_capability(card), torch.cuda.get_arch_list())
        if problem:
            raise UserError(f"{torch.cuda.get_device_name(card)}, {problem}")


def _check_operators(settings: DeepSpeedSettings) -> None:
    zero = settings.keys.get("zero_optimization", {})
    for key in _QUANTIZED:
        if zero.get(key):
            _check_operator(f"zero_optimization.{key}", "QuantizerBuilder")
    section = zero.get("offload_param") or {}
    if section.get("device") == "nvme":
        _check_folder("zero_optimization.offload_param.nvme_path", Path(section["nvme_path"]))
        _check_operator('zero_optimization.offload_param.device "nvme"', "AsyncIOBuilder", "; install libaio-dev")
        if settings.keys.get("aio", {}).get("use_gds", False):
            _check_operator("aio.use_gds", "GDSBuilder")


def _check_operator(key: str, name: str, remedy: str = "") -> None:
    """Raises UserError if DeepSpeed has no operator of this name for the device, or cannot compile it here."""
    prepare_deepspeed()
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    builder = device.create_op_builder(name)
    if builder is None or builder.NAME == _NOT_IMPLEMENTED:
        raise UserError(f"{key}: DeepSpeed has no operator for it on the {device.device_name()} of this machine")
    if not builder.is_compatible(verbose=False):
        raise UserError(f"{key}: DeepSpeed cannot compile its operator {builder.NAME} on this machine{remedy}")


def _check_module(name: str) -> None:
    package, _, type_name = name.rpartition(".")
    try:
        getattr(importlib.import_module(package), type_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"torch_autocast.lower_precision_safe_modules: {name!r} cannot be imported ({error}); expected a class "
            'such as "torch.nn.Linear"'
        ) from None


def _check_folder(key: str, folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{key}: {folder} is {'a file' if folder.exists() else 'missing'}; expected a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{key}: {folder} cannot be written")
