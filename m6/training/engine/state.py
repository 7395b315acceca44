"""Weights, gradients, optimizer state and loss scale inside DeepSpeed's engine; written for DeepSpeed 0.19.8.

``fragments`` gives the training state as named ranges of flat global tensors, for our checkpoints. In every layout a
rank holds contiguous ranges of the flattened fp32 weight and moments of each parameter: the whole tensor at ZeRO stage
0, a partition at stages 1 to 3, and for experts the range of the local experts in the stack of all experts. Name, kind
and offset identify a range on any rank. Any layout can therefore read the ranges written by another layout.
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
from m6.training.engine.partitions import full_shape, is_expert, is_partitioned, partition_numel
from m6.training.mesh import named_expert_group

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# State of DeepSpeed's loss scaler; its other attributes are settings.
_SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def base_optimizer(deepspeed: DeepSpeedEngine) -> torch.optim.Optimizer:
    """Returns the PyTorch optimizer: inside ZeRO's optimizer, or the engine's optimizer at stage 0."""
    return deepspeed.optimizer if deepspeed.zero_optimization_stage() == 0 else deepspeed.optimizer.optimizer


def weights(deepspeed: DeepSpeedEngine) -> list[Tensor]:
    """The tensors of parameters and buffers; at stage 3 also this rank's partitions of the parameters."""
    parameters = list(deepspeed.module.parameters())
    tensors = [parameter.data for parameter in parameters] + list(deepspeed.module.buffers())
    if deepspeed.zero_optimization_stage() == 3:
        tensors += [parameter.ds_tensor for parameter in parameters]
    return tensors


def fp32_masters(deepspeed: DeepSpeedEngine) -> list[Tensor]:
    """Returns the flat fp32 partitions of ZeRO's optimizer; empty at stage 0."""
    stage, zero = deepspeed.zero_optimization_stage(), deepspeed.optimizer
    if stage == 0:
        return []
    return list(zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)


def moments(deepspeed: DeepSpeedEngine) -> list[Tensor]:
    """The tensors of the optimizer's state: moments and step counters."""
    states = base_optimizer(deepspeed).state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def gradients(deepspeed: DeepSpeedEngine) -> list[Tensor]:
    """Returns the tensors of gradients; complete between the last backward pass of a step and its update."""
    tensors = [parameter.grad for parameter in deepspeed.module.parameters() if parameter.grad is not None]
    zero = deepspeed.optimizer
    # ZeRO keeps gradients here instead of in ``parameter.grad``; the names depend on stage and offload.
    for name in ("averaged_gradients", "all_grad_tensors"):
        for group in getattr(zero, name, {}).values():
            tensors += [gradient for gradient in group or () if gradient is not None]
    if hasattr(zero, "grad_partitions_flat_buffer"):
        tensors.append(zero.grad_partitions_flat_buffer)
    return tensors


def create_moments(deepspeed: DeepSpeedEngine) -> None:
    """Allocates the optimizer's state before the first step, by an update with learning rate 0 and gradients of 0.

    The weights do not change, and the number of updates is restored.
    """
    optimizer, updates = base_optimizer(deepspeed), optimizer_step(deepspeed)
    if deepspeed.zero_optimization_stage() == 0:
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    else:
        updated = fp32_masters(deepspeed)
    missing = [parameter for parameter in updated if not optimizer.state.get(parameter)]
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    # One parameter at a time: gradients for all of them would need as much memory as the weights.
    for parameter in missing:
        # Stage 3 puts a partition into its group only for its update. Its groups differ only in the weight decay.
        options = groups.get(parameter, optimizer.param_groups[0])
        param_groups, gradient = optimizer.param_groups, parameter.grad
        optimizer.param_groups = [{**options, "params": [parameter], "lr": 0.0}]
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.param_groups, parameter.grad = param_groups, gradient
    if missing:
        set_optimizer_step(deepspeed, updates)


def optimizer_step(deepspeed: DeepSpeedEngine) -> int:
    """Number of updates of the optimizer; Adam's bias correction and Adafactor's decay depend on it."""
    states = base_optimizer(deepspeed).state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def set_optimizer_step(deepspeed: DeepSpeedEngine, step: int) -> None:
    """Overwrites the number of updates of every parameter."""
    for state in base_optimizer(deepspeed).state.values():
        if "step" in state:
            state["step"].fill_(step)


def publish_weights(deepspeed: DeepSpeedEngine) -> None:
    """Copies the fp32 masters into the tensors of the forward pass."""
    stage, zero = deepspeed.zero_optimization_stage(), deepspeed.optimizer
    if stage in (1, 2):
        zero.update_lp_params()
    elif stage == 3:
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        # Small parameters stay gathered between steps; this call gathers them again from the new partitions.
        zero._post_step([])


def release(deepspeed: DeepSpeedEngine) -> None:
    """Destroys the engine and frees its weights, gradients and optimizer state.

    Deleting the last reference is not enough: DeepSpeed 0.19.8 keeps references to a stage-3 engine in its caches.
    """
    stage, zero = deepspeed.zero_optimization_stage(), deepspeed.optimizer
    deepspeed.destroy()
    tensors: list[Any] = [*deepspeed.module.parameters(), *deepspeed.module.buffers()]
    if stage == 3:
        tensors += [parameter.ds_tensor for parameter in deepspeed.module.parameters()]
        tensors += [*zero.fp32_partitioned_groups_flat, *zero.fp16_partitioned_groups_flat]
        tensors += [zero.lp_param_buffer, zero.grad_partitions_flat_buffer]
    elif stage > 0:
        tensors += [*zero.single_partition_of_fp32_groups, *zero.bit16_groups_flat]
    optimizer = zero if stage == 0 else zero.optimizer
    for tensor in tensors:
        if tensor is not None:
            # Other objects may still refer to the tensor: replacing its data frees the memory anyway.
            tensor.grad = None
            tensor.data = tensor.new_empty(0)
    optimizer.state.clear()


class LossScale:
    """The factor on the loss. It keeps small gradients in the range of fp16; it is 1 in other precisions.

    DeepSpeed changes the scale before it divides the gradients by it, so a growing scale would halve the gradients of
    this step. Here ``change`` changes it at the end of the step. If a gradient overflows at the smallest scale,
    ``NonfinitePolicy`` ends the run with the reason, instead of DeepSpeed.

    Args:
        zero: the optimizer of a DeepSpeed engine at ZeRO stage 1, 2 or 3.
    """

    def __init__(self, zero: Any) -> None:
        self._scaler = zero.loss_scaler
        self._scaler.raise_error_at_min_scale = False

        def change_nothing(has_overflow: bool = False) -> None:
            pass

        zero._update_scale = change_nothing

    @property
    def value(self) -> float:
        """The scale of the gradients of the current step."""
        return float(self._scaler.cur_scale)

    def change(self, skipped: bool) -> None:
        """Ends a step. The scale falls after skipped steps, and grows after many steps without a skip."""
        self._scaler.update_scale(skipped)

    def state(self) -> dict[str, Any]:
        """Returns the scaler's state as JSON; empty if the scale is constant."""
        return {key: getattr(self._scaler, key) for key in _SCALE_STATE} if self._scaler.dynamic else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the result of ``state``."""
        for key in _SCALE_STATE:
            if key in state:
                setattr(self._scaler, key, state[key])


def fragments(deepspeed: DeepSpeedEngine, replicas: dist.ProcessGroup | None) -> Iterator[Fragment]:
    """Yields every range of training state on this rank: weights, in fp32 where masters exist, and moments.

    The caller creates the optimizer's moments first (``create_moments``).

    Args:
        replicas: the ranks with the same dense parameters; None: all.
    """
    stage = deepspeed.zero_optimization_stage()
    for name, parameter in deepspeed.module.named_parameters():
        location = _Location.of(name, parameter, replicas)
        if not parameter.requires_grad:
            yield from _frozen(location, parameter)
        elif stage == 0:
            yield from _unpartitioned(location, parameter, deepspeed.optimizer.state[parameter])
        elif stage == 3:
            yield from _stage_3(location, parameter, deepspeed.optimizer)
        else:
            yield from _stage_1_2(location, parameter, deepspeed.optimizer)
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
    if is_partitioned(parameter):
        yield from _stage_3_range(location, parameter, WEIGHT, parameter.ds_tensor)  # type: ignore[attr-defined]
    else:
        yield location.fragment(WEIGHT, 0, parameter.detach().view(-1), tuple(parameter.shape), replicated=True)


def _unpartitioned(location: _Location, parameter: nn.Parameter, state: dict[str, Any]) -> Iterator[Fragment]:
    yield location.fragment(WEIGHT, 0, parameter.detach().view(-1), tuple(parameter.shape), replicated=True)
    for kind, value in state.items():  # the step counter has no dimension; ``Engine.counters`` saves it
        if torch.is_tensor(value) and value.dim() > 0:
            yield location.fragment(kind, 0, value.view(-1), tuple(value.shape), replicated=True)


def _stage_1_2(location: _Location, parameter: nn.Parameter, zero: Any) -> Iterator[Fragment]:
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:  # no element of the parameter is in this rank's partition
        return
    start, shape = mapping.lp_fragment_address.start, tuple(parameter.shape)
    yield location.fragment(WEIGHT, start, mapping.hp_fragment.detach(), shape, replicated=False)
    # mapping.optim_fragment is incomplete: DeepSpeed 0.19.8 sets it once, after the first step of the first parameter
    # group. At that time the other groups have no state.
    address, flat = mapping.get_hp_fragment_address(), zero.single_partition_of_fp32_groups[mapping.param_group_index]
    for kind, value in zero.optimizer.state[flat].items():
        if torch.is_tensor(value) and value.shape == flat.shape:
            yield location.fragment(kind, start, value.narrow(0, address.start, address.numel), shape, replicated=False)


def _stage_3(location: _Location, parameter: nn.Parameter, zero: Any) -> Iterator[Fragment]:
    group, begin, numel = zero.grad_position[zero.get_param_id(parameter)]
    flat = zero.fp32_partitioned_groups_flat[group]
    yield from _stage_3_range(location, parameter, WEIGHT, flat.detach()[begin : begin + numel])
    for kind, value in zero.optimizer.state[flat].items():
        if torch.is_tensor(value) and value.shape == flat.shape:
            yield from _stage_3_range(location, parameter, kind, value[begin : begin + numel])


def _stage_3_range(location: _Location, parameter: nn.Parameter, kind: str, partition: Tensor) -> Iterator[Fragment]:
    """Yields the range of a stage-3 partition, without the padding to equal lengths on all ranks."""
    start = partition.numel() * dist.get_rank()
    numel = partition_numel(parameter, partition.numel())
    if numel > 0:
        yield location.fragment(kind, start, partition[:numel], location.shape, replicated=False)
