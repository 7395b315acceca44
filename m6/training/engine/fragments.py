"""The training state of an engine as named ranges of flat global tensors, for our checkpoints.

In every layout a rank holds contiguous ranges of the flattened fp32 weight and moments of each parameter: the whole
tensor at ZeRO stage 0, a partition at stages 1 to 3, and for experts the range of the local experts in the stack of all
experts. Name, kind and offset identify a range on any rank. Any layout can therefore read the ranges written by another
layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.checkpoints.format import WEIGHT, Fragment
from m6.training.deepspeed_private import (
    Piece,
    base_optimizer,
    full_shape,
    is_expert,
    is_partitioned,
    named_expert_group,
    partition,
    partition_start,
    pieces,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def fragments(deepspeed: DeepSpeedEngine, replicas: dist.ProcessGroup | None) -> Iterator[Fragment]:
    """Yields every range of training state on this rank: weights, in fp32 where masters exist, and moments.

    The caller creates the optimizer's moments first (``create_moments``).

    Args:
        replicas: the ranks with the same dense parameters; None: all.
    """
    stage, state = deepspeed.zero_optimization_stage(), base_optimizer(deepspeed).state
    found = pieces(deepspeed) if stage > 0 else {}
    for name, parameter in deepspeed.module.named_parameters():
        location = _Location.of(name, parameter, replicas)
        if not parameter.requires_grad:
            yield from _frozen(location, parameter)
        elif stage == 0:
            yield from _unpartitioned(location, parameter, state[parameter])
        elif parameter in found:  # otherwise this rank has no element of the parameter
            yield from _partitioned(location, parameter, found[parameter], state[found[parameter].flat])
    for name, buffer in deepspeed.module.named_buffers():
        if name in deepspeed.module.state_dict(keep_vars=True):  # other buffers are not persistent
            yield Fragment(name, WEIGHT, 0, buffer.view(-1), tuple(buffer.shape), _replica(replicas))


@dataclass(frozen=True)
class _Location:
    """The position of a parameter's local tensor in the global tensor.

    Attributes:
        shape: shape of the global tensor.
        experts: the first expert of the local tensor and the number of all experts; None for other parameters.
        replica: see ``Fragment``.
    """

    name: str
    shape: tuple[int, ...]
    experts: tuple[int, int] | None
    replica: tuple[int, int]

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, replicas: dist.ProcessGroup | None) -> _Location:
        shape = full_shape(parameter)
        if not is_expert(parameter):
            return cls(name, shape, None, _replica(replicas))
        experts = (parameter.first_expert, parameter.num_global_experts)  # type: ignore[attr-defined]
        group = named_expert_group("expert_data_parallel", parameter.group_name)  # type: ignore[attr-defined]
        return cls(name, (experts[1], *shape[1:]), experts, _replica(group))

    def fragment(self, kind: str, start: int, data: Tensor, local_shape: tuple[int, ...], replicated: bool) -> Fragment:
        """Makes the fragment of ``data``, from element ``start`` of a local tensor of shape ``local_shape``.

        The local tensor is the weight, a moment, or a factor of a moment (Adafactor's rows and columns).
        """
        shape = local_shape
        if self.experts is not None:
            first, count = self.experts
            start += first * math.prod(local_shape[1:])
            shape = (count, *local_shape[1:])
        return Fragment(self.name, kind, start, data, shape, self.replica if replicated else (0, 1))


def _replica(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's index in the group and the group's size; ``Fragment.replica``."""
    if not dist.is_initialized():
        return (0, 1)
    return (dist.get_rank(group), dist.get_world_size(group))


def _frozen(location: _Location, parameter: nn.Parameter) -> Iterator[Fragment]:
    if not is_partitioned(parameter):
        yield location.fragment(WEIGHT, 0, parameter.detach().view(-1), tuple(parameter.shape), replicated=True)
    elif len(own := partition(parameter)) > 0:
        yield location.fragment(WEIGHT, partition_start(parameter), own, location.shape, replicated=False)


def _unpartitioned(location: _Location, parameter: nn.Parameter, state: dict[str, Any]) -> Iterator[Fragment]:
    yield location.fragment(WEIGHT, 0, parameter.detach().view(-1), tuple(parameter.shape), replicated=True)
    for kind, value in state.items():  # the step counter has no dimension; ``Engine.counters`` saves it
        if torch.is_tensor(value) and value.dim() > 0:
            yield location.fragment(kind, 0, value.view(-1), tuple(value.shape), replicated=True)


def _partitioned(
    location: _Location, parameter: nn.Parameter, piece: Piece, state: dict[str, Any]
) -> Iterator[Fragment]:
    for kind, value in {WEIGHT: piece.flat.detach(), **state}.items():
        if torch.is_tensor(value) and value.shape == piece.flat.shape:  # the step counter has another
            own = value[piece.place : piece.place + piece.numel]
            yield location.fragment(kind, piece.start, own, full_shape(parameter), replicated=False)
