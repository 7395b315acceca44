"""FLOPs of the training, peak FLOP/s of devices, and memory in use."""

from __future__ import annotations

import psutil
import torch

from m6.architecture.settings import ModelSettings
from m6.model.counting import num_parameters
from offload import CudaDevice

# Peak FLOP/s of dense 16-bit matrix products by the vendors' data sheets; the key is a part of the device's name.
# A longer name comes before one that it contains: cards of PCI Express reach less than modules of the same model.
_PEAK_FLOPS = {
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
}
_WITHOUT_BF16 = ("V100",)


def training_flops(
    config: ModelSettings,
    tokens: float,
    targets: float,
    pictures: float,
    token_pairs: float,
    experts_per_token: float | None = None,
) -> float:
    """FLOPs of the forward and backward pass: 6 per token and parameter (Kaplan et al. 2020, arXiv 2001.08361, 2.1).

    The output matrix counts only at targets and the patch encoder only at patches. Attention counts half of the pairs
    of tokens of a sample, as for causal attention. Embeddings and recomputation do not count. A convolutional patch
    encoder needs more FLOPs than this function returns. Choices that a capacity drops are not computed.

    Args:
        config: of the model.
        tokens: number of tokens without padding.
        targets: number of tokens with a loss.
        pictures: number of pictures that the model reads.
        token_pairs: sum of the squared lengths of the samples.
        experts_per_token: routed experts that compute a token of a sparse layer, in the mean; None: all that it
            chooses.
    """
    counts = num_parameters(config, experts_per_token=experts_per_token)
    per_token = 6.0 * (counts["active_per_token"] - counts["embeddings"] - counts["patch_encoder"])
    attention = 6.0 * config.num_layers * config.hidden_size * token_pairs
    patches = 6.0 * counts["patch_encoder"] * pictures * config.num_patches
    return tokens * per_token + attention + patches + targets * 6.0 * config.vocab_size * config.hidden_size


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The peak FLOP/s of a GPU for products in ``fp16`` or ``bf16`` by its data sheet; None if it is not known.

    A CPU has no such figure: what its libraries reach depends on their kernels and on the load.
    """
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    if precision == "bf16" and any(model in name for model in _WITHOUT_BF16):
        return None
    return next((flops for model, flops in _PEAK_FLOPS.items() if model in name), None)


def memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on the GPU since the start, or the resident memory of the process on a CPU."""
    if device.type == "cuda":
        return CudaDevice.largest_peak(device)
    return int(psutil.Process().memory_info().rss)
