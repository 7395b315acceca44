"""Steps of large models as the planner sees them, from their shapes alone; and what rules of other systems would move.

The latter are replays of rules on the same step in the same memory, not runs of systems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.memory.layout import ChunkBytes
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


Choice = Callable[[set[int], int, list[int], dict[int, int]], int]
_PATRICKSTAR_STATES = 12  # fp32 master and moments, bytes per parameter


def zero_3_offload(job: Job) -> int:
    """ZeRO-Infinity on the host (arXiv 2104.07857) as DeepSpeed 0.19.8 runs it: nothing stays on the device.

    Every use fetches 16-bit weights; a gradient goes down in 16 bits, comes back to be cast and goes down in fp32.
    """
    moments = job.trace.moments
    again = {time for time in range(1, len(moments)) if moments[time].chunk == moments[time - 1].chunk}
    uses = sum(job.sizes[moment.chunk].weight for time, moment in enumerate(moments) if time not in again)
    return uses + (2 + 2 + 4) * job.parameters


def patrickstar(job: Job) -> int:
    """PatrickStar (arXiv 2108.05818): the chunk that is used last leaves, and is written back whether dirty or not.

    Weights have the device first; what is left at the peak of non-model memory holds fp32 states. For the part whose
    states are on the host a gradient goes down and a weight comes up. 80 % of the device may be used, its default.
    """
    usable = 0.8 * job.device_bytes
    peak = max(moment.nonmodel_bytes for moment in job.trace.moments)
    weights = sum(size.weight for size in job.sizes)
    margin = max(0.0, usable - peak - weights)
    on_device = min(1.0, margin / (_PATRICKSTAR_STATES * job.parameters))
    moved = _replay(job, lambda moment: usable - moment.nonmodel_bytes - margin, _farthest, write_back=True)
    return moved + int((1 - on_device) * 2 * weights)


def lru(job: Job) -> int:
    """The device caches weights by least recent use and drops them clean; the host updates, so all come up anew."""
    moved = _replay(job, lambda moment: job.device_bytes - moment.nonmodel_bytes, _least_recent, write_back=False)
    return moved + sum(job.sizes[moment.chunk].gradient for moment in job.trace.moments if moment.backward)


def _replay(job: Job, room: Callable[[Moment], float], choose: Choice, write_back: bool) -> int:
    """Bytes of weights that one step moves; with ``write_back`` in an endless run, else from an empty device."""
    order = [moment.chunk for moment in job.trace.moments]
    resident: set[int] = set()
    last_use: dict[int, int] = {}
    moved = 0
    for _ in range(3 if write_back else 1):  # the third step begins as it ends
        moved = 0
        for time, moment in enumerate(job.trace.moments):
            moved += 0 if moment.chunk in resident else job.sizes[moment.chunk].weight
            resident.add(moment.chunk)
            last_use[moment.chunk] = time
            while sum(job.sizes[chunk].weight for chunk in resident) > room(moment) and len(resident) > 1:
                victim = choose(resident - {moment.chunk}, time, order, last_use)
                resident.remove(victim)
                moved += job.sizes[victim].weight if write_back else 0
    return moved


def _farthest(candidates: set[int], time: int, order: list[int], last_use: dict[int, int]) -> int:
    following = order[time + 1 :] + order[: time + 1]
    return max(candidates, key=lambda chunk: (following.index(chunk), chunk))


def _least_recent(candidates: set[int], time: int, order: list[int], last_use: dict[int, int]) -> int:
    return min(candidates, key=lambda chunk: (last_use[chunk], chunk))
