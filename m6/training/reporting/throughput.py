"""FLOPs of the training, peak FLOP/s of devices, and memory in use."""

from __future__ import annotations

import psutil
import torch

from m6.architecture.settings import ModelSettings
from m6.model.parameters import num_parameters
from m6.model.patch_encoders import patch_products
from offload import CudaDevice

# Peak FLOP/s of dense 16-bit matrix products by the vendors' data sheets; the key is a part of the device's name.
# The first match counts, so "H100 PCIe" comes before "H100": PCI Express cards reach less than modules.
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
    """Returns the FLOPs of forward and backward passes: 6 per token and parameter (Kaplan et al., 2001.08361, 2.1).

    The output matrix counts only at targets and the patch encoder only at patches. Attention counts half of the pairs
    of tokens of a sample, as for causal attention. Embeddings, recomputation and dropped choices do not count.

    Args:
        config: of the model.
        tokens: number of tokens without padding.
        targets: number of tokens with a loss.
        pictures: number of input images.
        token_pairs: sum of the squared lengths of the samples.
        experts_per_token: mean number of routed experts for a token in a sparse layer; None: all chosen experts.
    """
    counts = num_parameters(config, experts_per_token=experts_per_token)
    per_token = 6.0 * (counts["active_per_token"] - counts["embeddings"] - counts["patch_encoder"])
    attention = 6.0 * config.num_layers * config.hidden_size * token_pairs
    patches = pictures * config.num_patches * sum(product.training_flops for product in patch_products(config))
    return tokens * per_token + attention + patches + targets * 6.0 * config.vocab_size * config.hidden_size


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the peak FLOP/s of a GPU for products in ``fp16`` or ``bf16`` by its data sheet; None if unknown.

    A CPU has no such figure: its speed depends on the kernels of its libraries and on the load.
    """
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    if precision == "bf16" and any(model in name for model in _WITHOUT_BF16):
        return None
    return next((flops for model, flops in _PEAK_FLOPS.items() if model in name), None)


def memory_bytes(device: torch.device) -> int:
    """Returns the peak bytes allocated on the GPU since the start, or the resident memory of the process on a CPU."""
    if device.type == "cuda":
        return CudaDevice.largest_peak(device)
    return int(psutil.Process().memory_info().rss)
