"""Steps of large models as the planner sees them, from their shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from offload.plan.sizes import ChunkBytes
from offload.plan.trace import Moment, Trace

ADAM = 12  # bytes per parameter beside the gradient: split master 4, moments 8
ADAFACTOR = 4  # split master; rows and columns of second moments are less than 1 % of it
GRADIENT = 2


@dataclass(frozen=True)
class Job:
    """One rank's step, its chunks, and the bytes that they may use of the device and of its host."""

    parameters: int
    trace: Trace
    sizes: list[ChunkBytes]
    device_bytes: int
    host_bytes: int


def gpt(
    num_layers: int,
    hidden_size: int,
    micro_batch_size: int,
    *,
    mixed: bool = False,
    gradients_kept: bool = True,
    chunks_per_layer: int = 2,
    ranks: int = 8,
    device_bytes: float = 0.9 * 32e9,
    host_bytes: float = 0.9 * 240e9 / 8,
) -> Job:
    """A dense GPT in 16 bits, sequences of 1024, parameters and states sharded over the ranks, every layer recomputed.

    Non-model memory is a checkpoint [B, S, D] a layer so far, and the activations of one layer, s b h (34 + 5 a s / h)
    bytes with a = h / 128 heads (Korthikanti et al. 2022, arXiv 2205.05198, equation 1).

    Args:
        gradients_kept: until the norm of all of them is known; else the host updates in the backward pass.
        mixed: attention and feed-forward are chunks of their own, 1 to 2, instead of equal ones.
    """
    shares = [1 / 3, 2 / 3] if mixed else [1 / chunks_per_layer] * chunks_per_layer
    layer_numel = 12 * hidden_size**2 // ranks
    numels = [int(layer_numel * share) for share in shares]
    tokens = 1024 * micro_batch_size
    layer_bytes = tokens * hidden_size * 34 + 5 * (hidden_size // 128) * 1024 * tokens
    nonmodel_bytes = [layer_bytes + (layer + 1) * 2 * tokens * hidden_size for layer in range(num_layers)]
    states = ADAM + GRADIENT * gradients_kept
    return _zigzag(numels, nonmodel_bytes, layer_bytes, states, int(device_bytes), int(host_bytes))


def m6_10t(experts_per_chunk: int, activation_bytes: int, gradients_kept: bool = True) -> Job:
    """One of the 512 ranks of M6-10T (arXiv 2110.03888): 48 layers of 20 experts, 32 GB, 92 GB of its host."""
    numels = [experts_per_chunk * 2 * 1024 * 9984] * (20 // experts_per_chunk)
    nonmodel_bytes = [activation_bytes] * 48
    states = ADAFACTOR + GRADIENT * gradients_kept
    return _zigzag(numels, nonmodel_bytes, activation_bytes, states, 32 * 10**9, 92 * 10**9)


def _zigzag(
    numels: list[int], nonmodel_bytes: list[int], outside: int, owned_bytes: int, device_bytes: int, host_bytes: int
) -> Job:
    """Forward through all layers' chunks; backward, in each layer, forward again and then back."""
    layers = [range(layer * len(numels), (layer + 1) * len(numels)) for layer in range(len(nonmodel_bytes))]
    moments = [
        Moment(chunk, False, (), bytes_)
        for chunks, bytes_ in zip(layers, nonmodel_bytes, strict=True)
        for chunk in chunks
    ]
    for chunks, bytes_ in reversed(list(zip(layers, nonmodel_bytes, strict=True))):
        moments += [Moment(chunk, False, (), bytes_) for chunk in chunks]
        moments += [Moment(chunk, True, (), bytes_) for chunk in reversed(chunks)]
    sizes = [ChunkBytes(2 * numel, 2 * numel, owned_bytes * numel) for numel in numels] * len(nonmodel_bytes)
    # Two staging blocks for gradients lie on the host whatever it holds.
    host_bytes -= 2 * GRADIENT * max(numels)
    return Job(sum(numels) * len(nonmodel_bytes), Trace(tuple(moments), outside), sizes, device_bytes, host_bytes)
