"""The experts of ``m6.offload``, in the layout of the store itself: their memory and traffic."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import torch

from m6.architecture.settings import ModelSettings
from m6.config.offload import OffloadSettings
from m6.config.run import RunConfig
from m6.planning.cost.folding import Block, UniqueLayers
from m6.planning.cost.parameter_counts import MuonMatrices
from m6.training.optimizers import DTYPES, expert_optimizer, gradient_dtype_of, next_weights_of
from m6.training.sizes import FP32, Precision
from offload import (
    ChunkBytes,
    NextWeights,
    OptimizerSettings,
    Stack,
    lay_out,
    remainder_dtype,
    sizes_of,
    staging_bytes,
)

_MIB = 2**20
# Bytes read and written by the operators of ``offload.optimizer.update`` per parameter owned by a device. Split
# bfloat16 masters need more, and so does the norm of the gradients. A test counts them.
_DEVICE_UPDATE_BYTES = {"adamw": 196, "adafactor": 222, "sgd": 72, "muon": 222}
_SPLIT_MASTER_BYTES = 80
_DEVICE_NORM_BYTES = 32
_CHUNK_MIB = 64.0  # if a run chooses the size at its start; the size hardly changes the sum


@dataclass(frozen=True)
class ExpertStore:
    """How the store keeps a run's experts.

    Attributes:
        dtype: of the weights on the device, and of their copies.
        gradient_dtype: of gradients kept on the host until the update; None: it keeps none.
        optimizer: the experts' optimizer.
        chunk_bytes: the largest copy.
        num_threads: threads for the update of experts.
        next_weights: where delayed updates put new weights; None: updates are not delayed.
        update_flops: FLOPs of the products in the update of a parameter.
    """

    dtype: torch.dtype
    gradient_dtype: torch.dtype | None
    optimizer: OptimizerSettings
    chunk_bytes: int
    num_threads: int
    next_weights: NextWeights | None = None
    update_flops: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, passes: int, shared: bool) -> ExpertStore:
        """The store of a run. Without a section ``m6.offload`` the section's defaults apply.

        ``m6.offload`` refuses autocast. A run with autocast is priced as a bf16 run.

        Args:
            config: the run.
            passes: backward passes of a step.
            shared: whether layers share experts.
        """
        settings = config.expert_store or OffloadSettings()
        precision = config.deepspeed.precision
        if precision == "fp32" and Precision.of(config).compute == 2:
            precision = "bf16"
        dtype = DTYPES[precision]
        chunk_mib = _CHUNK_MIB if isinstance(settings.chunk_mib, str) else settings.chunk_mib
        gradient = gradient_dtype_of(settings, dtype, passes, shared)
        place = next_weights_of(config, passes, shared)
        optimizer, _ = expert_optimizer(config)
        flops = muon_flops(config.model) if optimizer.kind == "muon" else 0.0
        return cls(dtype, gradient, optimizer, int(chunk_mib * _MIB), settings.num_threads, place, flops)

    @property
    def optimizer_type(self) -> str:
        """The experts' optimizer as a run's JSON names it."""
        return {"adamw": "AdamW", "adafactor": "Adafactor", "sgd": "SGD", "muon": "Muon"}[self.optimizer.kind]

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight on the device, and of a gradient sent to the host."""
        return self.dtype.itemsize

    @property
    def update_bytes(self) -> int:
        """Bytes read and written in host memory by the update of a parameter, see docs/guides/offload.md."""
        remainder = remainder_dtype(self.dtype, self.optimizer.masters)
        master = 0 if remainder is None else remainder.itemsize
        # A whole master is read instead of the weight; a remainder is read in addition to it.
        read = master if master == 4 else self.weight_bytes + master
        written, gradient = self.weight_bytes + master, (self.gradient_dtype or self.dtype).itemsize
        if self.optimizer.kind == "adafactor":
            return 3 * gradient + 2 * read + written
        moments = {"adamw": 2, "muon": 1}.get(self.optimizer.kind, int(self.optimizer.momentum > 0))
        return gradient + read + written + 2 * moments * FP32

    @property
    def device_update_bytes(self) -> int:
        """Bytes read and written on the owning device by the update of a parameter."""
        is_split = self.dtype == torch.bfloat16 and self.optimizer.masters
        return _DEVICE_UPDATE_BYTES[self.optimizer.kind] + (_SPLIT_MASTER_BYTES if is_split else 0)

    def gradient_bytes(self, number: int, on_device: bool) -> int:
        """Bytes read and written for the sum of ``number`` gradients of a parameter.

        Args:
            number: gradients of a step.
            on_device: the device owns the parameter, so no gradient is first copied to host memory.
        """
        width, arrives = self.weight_bytes, 0 if on_device else self.weight_bytes
        if self.gradient_dtype is None:  # the update reads it from where it arrives
            return number * arrives
        total = self.gradient_dtype.itemsize
        copied = arrives + width + total
        # The first one of the same type arrives where it stays. A device squares for the norm in double precision.
        first = width if self.gradient_dtype == self.dtype and not on_device else copied
        return first + (number - 1) * (copied + total) + total + (_DEVICE_NORM_BYTES if on_device else 0)

    def sum_bytes(self, at_once: int) -> int:
        """Bytes of a parameter's gradient sum held on the device, see ``offload.runtime.updates``.

        Args:
            at_once: interleaved micro-batches.
        """
        return {1: 0, 2: self.weight_bytes}.get(at_once, FP32)

    def summing_bytes(self, at_once: int) -> int:
        """Bytes read and written on the device for the sum of ``at_once`` gradients of a parameter."""
        each, width = self.sum_bytes(at_once), self.weight_bytes
        rounded = width + each if each > width else 0  # once to a wider type, and once back
        return (at_once - 1) * (width + 2 * each) + 2 * rounded

    def chunks(self, model: UniqueLayers, ep_size: int) -> RankChunks:
        """The chunks of one rank."""
        found: list[ChunkBytes] = []
        for block, _, stored in model.blocks:
            if block.experts:
                # Each layer is cut into chunks by itself, so equal layers have equal chunks.
                laid_out = (self.chunk_bytes, self.dtype, self.gradient_dtype, self.optimizer, self.next_weights)
                found += stored * sizes_of(lay_out([_stack(block, ep_size)], *laid_out))
        ends = itertools.accumulate(size.owned for size in found)
        return RankChunks(tuple(ends), staging_bytes(found) if found else 0)


@dataclass(frozen=True)
class RankChunks:
    """The chunks of one rank, in the order of the model.

    Attributes:
        ends: bytes of the first one, the first two, and so on, with gradients and optimizer state.
        staging: bytes of the host's staging blocks of gradients.
    """

    ends: tuple[int, ...]
    staging: int

    @property
    def total(self) -> int:
        """Bytes of all chunks."""
        return self.ends[-1] if self.ends else 0

    def fitting(self, room: float) -> int:
        """Bytes of the first chunks, as many whole ones as ``room`` bytes hold."""
        number = bisect.bisect_right(self.ends, room)
        return self.ends[number - 1] if number else 0

    def on_host(self, owned: int) -> int:
        """Bytes in host memory if the device owns ``owned`` bytes."""
        return self.total - owned + self.staging


def layer_numel(model: UniqueLayers, ep_size: int) -> int:
    """Elements of the experts of one layer on one rank, the largest over the layers."""
    stacks = [_stack(block, ep_size) for block, _, _ in model.blocks if block.experts]
    return max((stack.num_experts * stack.expert_size for stack in stacks), default=0)


def stored_numel(model: UniqueLayers, ep_size: int) -> int:
    """Elements of all experts on one rank."""
    stacks = [(_stack(block, ep_size), stored) for block, _, stored in model.blocks if block.experts]
    return sum(stack.num_experts * stack.expert_size * stored for stack, stored in stacks)


def uses_of_experts(model: UniqueLayers) -> float:
    """How many layers compute with the same experts: 1, and more in the Pseudo phase."""
    counts = [(computed, stored) for block, computed, stored in model.blocks if block.experts]
    return sum(computed for computed, _ in counts) / max(1, sum(stored for _, stored in counts))


def _stack(block: Block, ep_size: int) -> Stack:
    shapes = [block.shapes[index] for index in sorted(block.experts)]
    return Stack(block.type, shapes[0][0] // ep_size, {str(number): shape[1:] for number, shape in enumerate(shapes)})


def muon_flops(model: ModelSettings) -> float:
    """FLOPs of Muon's products for a parameter of an expert."""
    matrix = MuonMatrices(1, 1, model.ffn_hidden_size, model.hidden_size, of_experts=True)  # all have this shape
    return sum(product.flops for product in matrix.products("fp32")) / matrix.numel
