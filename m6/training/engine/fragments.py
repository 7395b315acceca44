"""Training state as named ranges of flat global tensors: the seam between DeepSpeed and our checkpoints.

Whatever the layout, a rank holds contiguous ranges of the flattened fp32 weight and moments of each
parameter: all of it at ZeRO stage 0, its partition at stages 1 to 3, and for experts the range of its own
experts inside the stack of all experts. Name, kind and offset identify a range without regard to who
holds it, so ranges written under one layout can be read under any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.checkpoints.fragment import WEIGHT, Fragment
from m6.training.engine.partitions import full_shape, is_expert, is_partitioned, partition_numel
from m6.training.expert_groups import named_expert_group

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def fragments(deepspeed: DeepSpeedEngine) -> Iterator[Fragment]:
    """Every range of training state on this rank: weights in fp32 where masters exist, then the moments.

    The optimizer's moments must exist (``create_moments``).
    """
    stage = deepspeed.zero_optimization_stage()
    for name, parameter in deepspeed.module.named_parameters():
        place = _Place.of(name, parameter)
        if not parameter.requires_grad:
            yield from _frozen(place, parameter)
        elif stage == 0:
            yield from _unpartitioned(place, parameter, deepspeed.optimizer.state[parameter])
        elif stage == 3:
            yield from _stage_3(place, parameter, deepspeed.optimizer)
        else:
            yield from _stage_1_2(place, parameter, deepspeed.optimizer)
    for name, buffer in deepspeed.module.named_buffers():
        if name in deepspeed.module.state_dict(keep_vars=True):
            yield Fragment(name, WEIGHT, 0, buffer.view(-1), tuple(buffer.shape), _replica(None))


@dataclass(frozen=True)
class _Place:
    """Where a parameter's local tensor lies in the global one."""

    name: str
    shape: tuple[int, ...]
    experts: tuple[int, int] | None
    """The first expert of the local tensor and the number of all experts; None where every rank has all of it."""
    replica: tuple[int, int]

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter) -> _Place:
        shape = full_shape(parameter)
        if not is_expert(parameter):
            return cls(name, shape, None, _replica(None))
        experts = (parameter.first_expert, parameter.num_global_experts)  # type: ignore[attr-defined]
        group = named_expert_group("expert_data_parallel", parameter.group_name)  # type: ignore[attr-defined]
        return cls(name, (experts[1], *shape[1:]), experts, _replica(group))

    def fragment(self, kind: str, start: int, data: Tensor, local_shape: tuple[int, ...], replicated: bool) -> Fragment:
        """A range that begins ``start`` elements into the local tensor of shape ``local_shape``: the weight's, or
        that of a factor of its moments."""
        shape = local_shape
        if self.experts is not None:
            first, count = self.experts
            start += first * math.prod(local_shape[1:])
            shape = (count, *local_shape[1:])
        return Fragment(self.name, kind, start, data, shape, self.replica if replicated else (0, 1))


def _replica(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        return (0, 1)
    return (dist.get_rank(group), dist.get_world_size(group))


def _frozen(place: _Place, parameter: nn.Parameter) -> Iterator[Fragment]:
    if is_partitioned(parameter):
        yield from _stage_3_range(place, parameter, WEIGHT, parameter.ds_tensor)  # type: ignore[attr-defined]
    else:
        yield place.fragment(WEIGHT, 0, parameter.detach().view(-1), tuple(parameter.shape), replicated=True)


def _unpartitioned(place: _Place, parameter: nn.Parameter, state: dict[str, Any]) -> Iterator[Fragment]:
    yield place.fragment(WEIGHT, 0, parameter.detach().view(-1), tuple(parameter.shape), replicated=True)
    for kind, value in state.items():
        if torch.is_tensor(value) and value.dim() > 0:
            yield place.fragment(kind, 0, value.view(-1), tuple(value.shape), replicated=True)


def _stage_1_2(place: _Place, parameter: nn.Parameter, zero: Any) -> Iterator[Fragment]:
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return
    start, shape = mapping.lp_fragment_address.start, tuple(parameter.shape)
    yield place.fragment(WEIGHT, start, mapping.hp_fragment.detach(), shape, replicated=False)
    # Not mapping.optim_fragment: DeepSpeed 0.19.8 links it after the first group's first step, when the
    # other groups have no state yet, and never again.
    address, flat = mapping.get_hp_fragment_address(), zero.single_partition_of_fp32_groups[mapping.param_group_index]
    for kind, value in zero.optimizer.state[flat].items():
        if torch.is_tensor(value) and value.shape == flat.shape:
            yield place.fragment(kind, start, value.narrow(0, address.start, address.numel), shape, replicated=False)


def _stage_3(place: _Place, parameter: nn.Parameter, zero: Any) -> Iterator[Fragment]:
    group, begin, numel = zero.grad_position[zero.get_param_id(parameter)]
    flat = zero.fp32_partitioned_groups_flat[group]
    yield from _stage_3_range(place, parameter, WEIGHT, flat.detach()[begin : begin + numel])
    for kind, value in zero.optimizer.state[flat].items():
        if torch.is_tensor(value) and value.shape == flat.shape:
            yield from _stage_3_range(place, parameter, kind, value[begin : begin + numel])


def _stage_3_range(place: _Place, parameter: nn.Parameter, kind: str, partition: Tensor) -> Iterator[Fragment]:
    """The partition without the padding with which stage 3 makes all ranks' partitions equally long."""
    start = partition.numel() * dist.get_rank()
    numel = partition_numel(parameter, partition.numel())
    if numel > 0:
        yield place.fragment(kind, start, partition[:numel], place.shape, replicated=False)
