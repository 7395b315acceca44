"""Initial weights that do not depend on how many processes hold them."""

import hashlib
import math
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from m6.model.configuration import M6Config
from m6.model.patch_encoders import EfficientNetPatchEncoder


@torch.no_grad()
def initialize_parameters(model: PreTrainedModel, seed: int, only_missing: bool = False) -> None:
    """Sets every parameter and buffer of an M6 model to its initial value, in place.

    A value is a function of the seed, the parameter's name and the expert's number in its whole layer alone:
    any world size, expert-parallel size, device and data type starts from the same weights. Works on what
    ``torch.device("meta")`` construction and ``to_empty`` left uninitialised. A parameter that several modules
    share is drawn once, under its first name.

    Matrices are normal with deviation ``initializer_range``; those that write to the residual stream
    are smaller by ``sqrt(2 * num_layers)``, the number of writers (GPT-2, Megatron-LM). Biases are 0, norms 1.

    Args:
        model: an M6Model, or one that holds it as ``model``; that prefix does not count in names.
        seed: any integer.
        only_missing: leave alone what transformers has marked as loaded from a checkpoint.
    """
    pretrained = [module for module in model.modules() if isinstance(module, EfficientNetPatchEncoder)]
    if only_missing:
        pretrained = [module for module in pretrained if not _is_loaded(next(module.trunk.parameters()))]
    config = cast(M6Config, model.config)
    done: set[int] = set()
    for module_name, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if id(tensor) not in done and not (only_missing and _is_loaded(tensor)):
                full_name = f"{module_name}.{name}".removeprefix("model.")
                _initialize(tensor, full_name, module, config, seed)
            done.add(id(tensor))
            tensor._is_hf_initialized = True  # for only_missing of an outer model
    for encoder in pretrained:
        encoder.load_pretrained_trunk()


@torch.no_grad()
def initialize_part(part: nn.Module, name: str, config: M6Config, seed: int) -> None:
    """Sets the parameters of the module that is called ``name`` in a model, as ``initialize_parameters`` would."""
    for own, tensor in part.named_parameters(recurse=False):
        _initialize(tensor, f"{name}.{own}".removeprefix("model."), part, config, seed)


def _is_loaded(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)


def _initialize(tensor: Tensor, name: str, module: nn.Module, config: M6Config, seed: int) -> None:
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("bias", "b_in", "b_out", "balance_bias", "running_mean", "num_batches_tracked"):
        tensor.zero_()
    elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
        # The last norm of a residual branch of the ResNet starts at 0, see ResNetPatchEncoder.
        tensor.fill_(0.0 if name.endswith(".layer.2.normalization.weight") else 1.0)
    elif isinstance(module, nn.Conv2d):
        # He et al., arXiv 1502.01852: keeps the size of the signal through ReLUs.
        fan_out = tensor.shape[0] * tensor.shape[2] * tensor.shape[3]
        _draw(tensor, math.sqrt(2.0 / fan_out), seed, name)
    elif ".experts." in name:
        first = getattr(tensor, "first_expert", 0)
        for index, expert in enumerate(tensor):
            _draw(expert, _deviation(name, config), seed, name, first + index)
    else:
        _draw(tensor, _deviation(name, config), seed, name)


def _deviation(name: str, config: M6Config) -> float:
    deviation = config.initializer_range
    scaled = ("attention.output.weight", "ffn.output.weight", "experts.w_out")
    if name.endswith((*scaled, "shared.w_out")):
        return deviation / math.sqrt(2 * config.num_layers)
    if name.endswith("patch_encoder.projection.weight") and config.patch_encoder == "linear":
        # A patch has many more inputs than a hidden state; its output shall not be larger for that.
        return deviation * math.sqrt(config.hidden_size / (3 * config.patch_size**2))
    return deviation


def _draw(tensor: Tensor, deviation: float, seed: int, name: str, expert: int | None = None) -> None:
    """Fills ``tensor``; always drawn on the CPU in fp32, since devices have generators of their own."""
    digest = hashlib.blake2b(f"{seed}/{name}/{expert}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    tensor.copy_(torch.empty(tensor.shape).normal_(0.0, deviation, generator=generator))
