"""Initial weights, identical for every layout of the run."""

import hashlib
import math
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from m6.architecture.names import DOWN, UP
from m6.architecture.settings import ModelSettings
from m6.model.patch_encoders import EfficientNetPatchEncoder


@torch.no_grad()
def initialize_parameters(model: PreTrainedModel, seed: int, only_missing: bool = False) -> None:
    """Sets every parameter and buffer of an M6 model to its initial value, in place.

    A value depends only on the seed, the parameter's name and the expert's number in its whole layer. A run thus
    starts from the same weights with any world size, expert-parallel size, device and data type. The parameters may
    be uninitialised memory (``torch.device("meta")``, then ``to_empty``). A parameter shared by several modules is
    initialized once, with its first name.

    Matrices are normal with standard deviation ``initializer_range``, divided by ``sqrt(2 * num_layers)`` if they
    write to the residual stream (GPT-2, Megatron-LM). Biases are 0, norms are 1.

    Args:
        model: an M6Model, or a model with an M6Model as ``model``; this prefix is not part of the names.
        seed: any integer.
        only_missing: skip tensors marked by transformers as loaded from a checkpoint.
    """
    pretrained = [module for module in model.modules() if isinstance(module, EfficientNetPatchEncoder)]
    if only_missing:
        pretrained = [module for module in pretrained if not _is_loaded(next(module.trunk.parameters()))]
    config = cast(ModelSettings, model.config)
    done: set[int] = set()
    for module_name, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if id(tensor) not in done and not (only_missing and _is_loaded(tensor)):
                full_name = f"{module_name}.{name}".removeprefix("model.")
                _initialize(tensor, full_name, module, config, seed)
            done.add(id(tensor))
            # transformers calls this function for the inner and for the outer model; the second call skips these.
            tensor._is_hf_initialized = True
    for encoder in pretrained:
        encoder.load_pretrained_trunk()


@torch.no_grad()
def initialize_part(part: nn.Module, name: str, config: ModelSettings, seed: int) -> None:
    """Initializes the parameters of one module like ``initialize_parameters``; ``name`` is its name in the model."""
    for parameter_name, tensor in part.named_parameters(recurse=False):
        _initialize(tensor, f"{name}.{parameter_name}".removeprefix("model."), part, config, seed)


def _is_loaded(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)


def _initialize(tensor: Tensor, name: str, module: nn.Module, config: ModelSettings, seed: int) -> None:
    shard = getattr(tensor, "shard", None)
    if shard is not None:  # a part of a matrix sharded over ranks
        whole = tensor.new_empty(shard.shape)
        _initialize(whole, name, module, config, seed)
        tensor.copy_(shard.of(whole).reshape(tensor.shape))
        return
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("bias", "b_in", "b_out", "balance_bias", "running_mean", "num_batches_tracked"):
        tensor.zero_()
    elif name.endswith(UP):
        tensor.zero_()  # an adapted model begins as the model without adapters
    elif isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
        # The last norm of each residual branch of the ResNet starts at 0, see ResNetPatchEncoder.
        tensor.fill_(0.0 if name.endswith(".layer.2.normalization.weight") else 1.0)
    elif isinstance(module, nn.Conv2d):
        # He et al., arXiv 1502.01852: keeps the variance of the signal through ReLUs.
        fan_out = tensor.shape[0] * tensor.shape[2] * tensor.shape[3]
        _draw(tensor, math.sqrt(2.0 / fan_out), seed, name)
    elif ".experts." in name:
        # Under expert parallelism the tensor holds only the experts of this rank.
        first = getattr(tensor, "first_expert", 0)
        for index, expert in enumerate(tensor):
            _draw(expert, _deviation(name, tensor, config), seed, name, first + index)
    else:
        _draw(tensor, _deviation(name, tensor, config), seed, name)


def _deviation(name: str, tensor: Tensor, config: ModelSettings) -> float:
    if name.endswith(DOWN):
        return 1 / math.sqrt(3 * tensor.shape[-1])  # the deviation of peft's uniform numbers
    deviation = config.initializer_range
    scaled = ("attention.output.weight", "ffn.output.weight", "experts.w_out")
    if name.endswith((*scaled, "shared.w_out")):
        return deviation / math.sqrt(2 * config.num_layers)
    if name.endswith("patch_encoder.projection.weight") and config.patch_encoder == "linear":
        # A patch has more inputs than a hidden state; without the factor its embedding would be larger than a token's.
        return deviation * math.sqrt(config.hidden_size / (3 * config.patch_size**2))
    return deviation


def _draw(tensor: Tensor, deviation: float, seed: int, name: str, expert: int | None = None) -> None:
    """Fills ``tensor`` with normal numbers, made on the CPU in fp32, since generators differ between devices."""
    digest = hashlib.blake2b(f"{seed}/{name}/{expert}".encode(), digest_size=8).digest()
    # A hash of the name, so a tensor's values do not depend on the tensors initialized before it.
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    tensor.copy_(torch.empty(tensor.shape).normal_(0.0, deviation, generator=generator))
