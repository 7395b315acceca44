"""How fast, how much of the hardware's speed, how much memory."""

from __future__ import annotations

import psutil
import torch

from m6.model.configuration import M6Config
from m6.model.counting import num_parameters

# Dense peak of a device in FLOP/s in 16 bits, from the vendor's data sheet, by a part of the device's name.
_PEAK_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "GB200": 2500e12}
_WITHOUT_BF16 = ("V100",)


def training_flops(config: M6Config, tokens: float, targets: float, pictures: float, token_pairs: float) -> float:
    """FLOPs of forward and backward: 6 per parameter that multiplies a token (Kaplan et al. 2020, arXiv
    2001.08361, section 2.1), with the output matrix at targets only and the patch encoder at patches only.

    Attention counts half of the pairs of tokens in a sample, as if all were causal. Embeddings are looked up, not
    multiplied, and recomputation is not counted. A patch encoder that convolves costs more than this.

    Args:
        config: of the model.
        tokens: without padding.
        targets: tokens that have a loss.
        pictures: that the model reads.
        token_pairs: the sum of the squared lengths of the samples.
    """
    counts = num_parameters(config)
    per_token = 6.0 * (counts["active_per_token"] - counts["embeddings"] - counts["patch_encoder"])
    attention = 6.0 * config.num_layers * config.hidden_size * token_pairs
    patches = 6.0 * counts["patch_encoder"] * pictures * config.num_patches
    return tokens * per_token + attention + patches + targets * 6.0 * config.vocab_size * config.hidden_size


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The peak FLOP/s of a GPU in ``fp16`` or ``bf16`` by its data sheet; None where there is no such figure.

    A CPU has none: what its libraries reach depends on their kernels and on the load, so a share of it says nothing.
    """
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    if precision == "bf16" and any(part in name for part in _WITHOUT_BF16):
        return None
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on the GPU since the start, or the resident bytes of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
