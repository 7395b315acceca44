"""Computes one line of metrics from the steps of a log interval."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch

from m6.architecture.settings import ModelSettings
from m6.config.run import RunConfig
from m6.model.parameters import num_parameters
from m6.model.patch_encoders import patch_products
from m6.runs.processes import Runtime
from m6.training.reporting.sums import StepOutcome


class IntervalReport:
    """Collects the outcomes of steps; ``finish`` returns their means and starts the next interval.

    The time of an interval excludes validation and sample images (``exclude``). It includes waits for data and for
    checkpoints. These are also reported separately.
    """

    def __init__(self, config: RunConfig, runtime: Runtime) -> None:
        self._runtime = runtime
        self._config = config
        self._peak = peak_flops(runtime.device, config.deepspeed.product_dtype)
        self._restart()

    def _restart(self) -> None:
        self._outcomes: list[StepOutcome] = []
        self._begin = time.perf_counter()
        self._excluded_s = self._data_wait_s = self._checkpoint_stall_s = 0.0

    def add(self, outcome: StepOutcome) -> None:
        """Adds a step."""
        self._outcomes.append(outcome)

    def add_data_wait(self, seconds: float) -> None:
        """Adds a step's wait for data, in seconds."""
        self._data_wait_s += seconds

    def exclude(self, seconds: float) -> None:
        """Subtracts seconds from the time of the interval."""
        self._excluded_s += seconds

    def add_checkpoint_stall(self, seconds: float) -> None:
        """Adds the stall of the training by a checkpoint, in seconds."""
        self._checkpoint_stall_s += seconds

    def finish(
        self, step: int, samples_seen: int, tokens_seen: int, experts_per_token: float | None = None
    ) -> dict[str, Any]:
        """Returns the entry for RUN/metrics.jsonl: losses in nats per target, times in seconds, memory in bytes.

        Args:
            experts_per_token: measured by ``ExpertHealth`` in the interval; None: a dense model.
        """
        outcomes = self._outcomes
        elapsed = time.perf_counter() - self._begin - self._excluded_s
        tokens = sum(outcome.tokens for outcome in outcomes)
        sums: dict[str, float] = {}
        targets: dict[str, float] = {}
        for outcome in outcomes:
            for name, count in outcome.result.targets.items():
                sums[name] = sums.get(name, 0.0) + outcome.result.loss_sums[name]
                targets[name] = targets.get(name, 0.0) + count
        pictures = sum(outcome.pictures for outcome in outcomes)
        pairs = sum(outcome.token_pairs for outcome in outcomes)
        # Model FLOPs leave out padding, recomputation and dropped choices.
        amounts = (tokens, sum(targets.values()), pictures, pairs, experts_per_token)
        speed = training_flops(self._config.model, *amounts) / elapsed
        entry = {
            "step": step,
            "time": time.time(),
            "samples_seen": samples_seen,
            "tokens_seen": tokens_seen,
            "loss": _mean([outcome.loss for outcome in outcomes]),
            "aux_loss": _mean([outcome.aux_loss for outcome in outcomes]),
            "objectives": {name: sums[name] / count for name, count in targets.items() if count},
            "learning_rate": outcomes[-1].learning_rate,
            "grad_norm": outcomes[-1].grad_norm,
            "skipped_steps": sum(outcome.skipped for outcome in outcomes),
            **({"loss_scale": outcomes[-1].loss_scale} if self._config.deepspeed.precision == "fp16" else {}),
            "bad_rows": sum(outcome.bad_rows for outcome in outcomes),
            "step_time_s": elapsed / len(outcomes),
            "data_wait_s": self._data_wait_s / len(outcomes),
            "checkpoint_stall_s": self._checkpoint_stall_s / len(outcomes),
            "tokens_per_second": tokens / elapsed,
            "samples_per_second": sum(outcome.samples for outcome in outcomes) / elapsed,
            "model_flops_per_second": speed,
            "mfu": None if self._peak is None else speed / (self._peak * self._runtime.world_size),
            "memory_bytes": memory_bytes(self._runtime.device),
        }
        self._restart()
        return entry


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


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
        from offload import CudaDevice

        return CudaDevice.largest_peak(device)
    return int(psutil.Process().memory_info().rss)
