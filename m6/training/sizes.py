"""The sizes of a run: of its micro-batches, its numbers and its storages. They decide memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from m6.config.run import RunConfig
from m6.data.collate import MicroBatch

if TYPE_CHECKING:
    from offload import StorageMeter


FP32 = 4
"""Bytes of an fp32 number."""
BUCKET_NUMEL = 500_000_000
"""DeepSpeed's default of ``reduce_bucket_size``, and the size of its buffers at ZeRO stage 0."""


@dataclass(frozen=True)
class Precision:
    """Bytes of an element.

    Attributes:
        weights: of the weights in the forward pass.
        compute: of the operands of matrix products.
        residual: of the residual stream.
    """

    weights: int
    compute: int
    residual: int

    @classmethod
    def of(cls, config: RunConfig) -> Precision:
        """The precision of a run: 16-bit, fp32, or fp32 under autocast."""
        if config.deepspeed.precision != "fp32":
            return cls(2, 2, 2)
        return cls(FP32, 2, FP32) if config.deepspeed.product_dtype == "bf16" else cls(FP32, FP32, FP32)

    def weight_copies(self, numel: int) -> int:
        """Bytes of autocast's 16-bit copies of ``numel`` weights; autograd keeps them with the product's input."""
        return 0 if self.compute == self.weights else numel * self.compute


@dataclass(frozen=True)
class BatchShape:
    """Sizes of one micro-batch.

    Attributes:
        samples: of the micro-batch; several may share a row.
        rows: B.
        sequence_length: S, padding included.
        real: tokens without padding.
        targets: tokens with a label.
        pictures: images of the micro-batch.
    """

    samples: int
    rows: int
    sequence_length: int
    real: int
    targets: int
    pictures: int

    @classmethod
    def of(cls, *batches: MicroBatch) -> BatchShape:
        """The largest of each size over ``batches``."""
        shapes = [
            (b.num_samples, *b.input_ids.shape, b.num_tokens, b.num_target_tokens, len(b.pixel_values)) for b in batches
        ]
        return cls(*(max(sizes) for sizes in zip(*shapes, strict=True)))


def full_row(config: RunConfig) -> BatchShape:
    """One row with one image and no padding. Every token is a target, so its cost is an upper bound for any data."""
    length = config.m6.data.sequence_length
    return BatchShape(samples=1, rows=1, sequence_length=length, real=length, targets=length, pictures=1)


def scale_batch(batch: BatchShape, samples: int) -> BatchShape:
    """The shape of ``samples`` samples like those of ``batch``."""
    share = samples / batch.samples
    rows, *others = (math.ceil(number * share) for number in (batch.rows, batch.real, batch.targets, batch.pictures))
    return BatchShape(samples, rows, batch.sequence_length, *others)


class SavedTensors:
    """Counts the bytes of the storages saved by autograd inside ``with``. It works on the meta device, too.

    Parameters and buffers of ``module`` do not count. A checkpointed block counts with its inputs only, not with
    recomputed tensors.

    Attributes:
        bytes: the sum so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self.bytes = 0
        self._seen = {_key(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._kept: list[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _identity)

    def _pack(self, tensor: Tensor) -> Tensor:
        if _key(tensor) not in self._seen:
            self._seen.add(_key(tensor))
            self._kept.append(tensor)  # otherwise a later storage could reuse the address
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor.detach()  # without it a node with its own output saved would form a reference cycle

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._kept.clear()


def new_storages(*existing: Tensor) -> StorageMeter:
    """A meter of the storages made by operators inside ``with``, without the storages of ``existing``."""
    from offload import StorageMeter

    return StorageMeter((), {_key(tensor) for tensor in existing})


def storage_bytes(*tensors: Tensor) -> int:
    """The bytes of the storages of ``tensors``. A storage of several tensors counts once."""
    return sum({_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # data_ptr is 0 on the meta device


def _identity(tensor: Tensor) -> Tensor:
    return tensor
