"""What we use of DeepSpeed's private parts, and what we replace there; written for DeepSpeed 0.19.8.

No other file of the training uses them. tests/unit/training/test_deepspeed_private.py looks for each name in DeepSpeed.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.training.reduction.messages import BUCKET_ELEMENTS

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

GroupKind = Literal["expert_parallel", "expert_data_parallel"]

_expert_shapes: WeakKeyDictionary[dist.ProcessGroup, tuple[int, int]] = WeakKeyDictionary()
"""Group of all ranks -> ``pp`` and ``tp`` of the last engine. DeepSpeed has made its groups of experts for these."""

# State of DeepSpeed's loss scaler; its other attributes are settings.
_SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

# Process groups


def install_mpu(mpu: Any, shape: tuple[int, int]) -> None:
    """Gives DeepSpeed the object that tells it how the model is divided.

    Args:
        mpu: with DeepSpeed's interface; None: the model is not divided.
        shape: the number of stages and of parts of matrices.
    """
    from deepspeed.utils import groups

    groups.mpu = mpu
    world = dist.group.WORLD
    assert world is not None
    if _expert_shapes.get(world, shape) != shape:
        # DeepSpeed would reuse groups of the same name from an engine with other stages.
        for name in ("EXPERT_PARALLEL", "EXPERT_DATA_PARALLEL"):
            getattr(groups, f"_{name}_GROUP").clear()
            getattr(groups, f"_{name}_GROUP_RANKS").clear()
    _expert_shapes[world] = shape


def expert_group(kind: GroupKind, ep_size: int) -> dist.ProcessGroup | None:
    """Returns one of DeepSpeed's process groups of this rank.

    Args:
        kind: ``expert_parallel``: ranks with all experts together; ``expert_data_parallel``: ranks with the same
            experts.
        ep_size: the size of the expert-parallel group.

    Returns:
        The group; None if ep_size is 1 and there are no tensor groups. All ranks then hold the same experts, and as an
        argument of a collective None means all ranks. In tensor groups, ranks with the same experts have different
        tokens of the same micro-batches, so experts have their own groups even if ep_size is 1.
    """
    from deepspeed.utils import groups

    if ep_size == 1 and f"ep_size_{ep_size}" not in groups._get_expert_parallel_group_dict():
        return None
    return named_expert_group(kind, f"ep_size_{ep_size}")


def named_expert_group(kind: GroupKind, name: str) -> dist.ProcessGroup:
    """Returns a process group of this rank; ``name`` is the ``group_name`` of an expert's parameter."""
    from deepspeed.utils import groups

    group: dist.ProcessGroup = getattr(groups, f"_get_{kind}_group")(name)
    return group


# Parameters


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO stage 3 partitions the parameter over all ranks."""
    return hasattr(parameter, "ds_tensor")


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether the parameter holds local experts of a stack. DeepSpeed averages it only over ranks with the same."""
    return not getattr(parameter, "allreduce", True)


def is_divided(parameter: nn.Parameter) -> bool:
    """Whether other ranks hold other parts of the parameter: experts, or parts of a sharded matrix."""
    return is_expert(parameter) or hasattr(parameter, "shard")


def full_numel(parameter: nn.Parameter) -> int:
    """The number of elements of the parameter without ZeRO's partitioning."""
    numel: int = getattr(parameter, "ds_numel", parameter.numel())
    return numel


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the parameter without ZeRO's partitioning."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def partition(parameter: nn.Parameter) -> Tensor:
    """Stage 3: this rank's elements, 1-D, without the padding to equal lengths."""
    padded: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    return padded[: partition_numel(parameter, padded.numel())]


def partition_start(parameter: nn.Parameter) -> int:
    """Stage 3: the first of this rank's elements."""
    padded: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    return padded.numel() * dist.get_rank()


def partition_numel(parameter: nn.Parameter, padded_numel: int) -> int:
    """Stage 3: the number of this rank's ``padded_numel`` elements without padding."""
    return max(0, min(padded_numel, full_numel(parameter) - padded_numel * dist.get_rank()))


def local_part(parameter: nn.Parameter) -> Tensor:
    """The elements of the parameter on this rank, 1-D."""
    return partition(parameter) if is_partitioned(parameter) else parameter.detach().reshape(-1)


def take_gradient(parameter: nn.Parameter) -> Tensor:
    """Moves the gradient of a parameter out of the model, in fp32; zeros if the model did not use the parameter."""
    # At stage 1 DeepSpeed may have moved a 16-bit gradient to an fp32 one.
    gradient = getattr(parameter, "grad_accum", None)
    gradient = parameter.grad if gradient is None else gradient
    parameter.grad = None
    if hasattr(parameter, "grad_accum"):
        parameter.grad_accum = None
    return torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient.float()


# Gradients in the optimizer of ZeRO stages 1 and 2


class Partition(NamedTuple):
    """This rank's part of the flat tensor of a parameter group.

    Attributes:
        flat: the fp32 weights of the part.
        parameters: of the whole group, in the order of the flat tensor.
        offsets: of each parameter in the flat tensor.
        begin: of the part in the flat tensor.
        group: the ranks with the other parts.
    """

    flat: Tensor
    parameters: Sequence[nn.Parameter]
    offsets: Sequence[int]
    begin: int
    group: dist.ProcessGroup


def partitions(zero: Any) -> list[Partition]:
    """Returns this rank's partitions, one for each parameter group."""
    found = []
    for index, flat in enumerate(zero.single_partition_of_fp32_groups):
        group = zero.real_dp_process_group[index]
        parameters, offsets = zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index]
        found.append(Partition(flat, parameters, offsets, dist.get_rank(group) * flat.numel(), group))
    return found


def sums_in_fp16(zero: Any) -> bool:
    """Whether the optimizer keeps summed gradients in fp16."""
    return bool(zero.gradient_accumulation_dtype == torch.float16)


def give_partition(zero: Any, gradients: dict[nn.Parameter, Tensor]) -> list[Tensor]:
    """Stores this rank's partition of whole gradients in DeepSpeed's stage-1 optimizer, and returns the partition."""
    for index, parameters in enumerate(zero.params_in_partition):
        dtype = zero.gradient_accumulation_dtype
        zero.all_grad_tensors[index] = [gradients[parameter].to(dtype) for parameter in parameters]
        zero.averaged_gradients[index] = zero.get_flat_partition(
            parameters,
            zero.first_offset[index],
            zero.partition_size[index],
            dtype=dtype,
            device=zero.single_partition_of_fp32_groups[index].device,
            param_group_idx=index,
            return_tensor_list=True,
        )
        zero.all_grad_tensors[index] = None
    return [gradient for group in zero.averaged_gradients.values() for gradient in group]


def scatter_sums(zero: Any, reduce_scatter: Callable[[Tensor, bool], Tensor], sent_type: torch.dtype | None) -> None:
    """Sums gradients over ranks, and stores this rank's partition of the sums in DeepSpeed's stage-1 optimizer.

    A reduce-scatter sends half the bytes of an all-reduce. The gradients leave the parameters.

    Args:
        reduce_scatter: sums [ranks, n] over the ranks with the same dense parts, or the same experts if the second
            argument is true, and returns the row of this rank.
        sent_type: the number format of messages; None: the type of the parameters.
    """
    for index, (flat, parameters, offsets, _, group) in enumerate(partitions(zero)):
        numel, ranks = flat.numel(), dist.get_world_size(group)
        dtype = zero.gradient_accumulation_dtype
        partition = torch.empty(numel, dtype=dtype, device=parameters[0].device)
        step = max(1, BUCKET_ELEMENTS // ranks)
        for begin in range(0, numel, step):
            own = partition[begin : begin + step]
            rows = torch.zeros(ranks, own.numel(), dtype=sent_type or parameters[0].dtype, device=own.device)
            for rank, row in enumerate(rows):
                _read_gradients(parameters, offsets, rank * numel + begin, row)
            own.copy_(reduce_scatter(rows, is_expert(parameters[0])))
        zero.averaged_gradients[index] = [partition]
        for parameter in parameters:
            parameter.grad = None


def partition_pieces(zero: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields each parameter with elements in this rank's stage-1 partition, and the gradient of these elements."""
    for index, (flat, parameters, offsets, begin, _) in enumerate(partitions(zero)):
        [sums] = zero.averaged_gradients[index]
        for parameter, _, start, end in _overlaps(parameters, offsets, begin, begin + flat.numel()):
            yield parameter, sums[start - begin : end - begin]


def _read_gradients(parameters: Sequence[nn.Parameter], offsets: Sequence[int], begin: int, row: Tensor) -> None:
    """Copies the elements from ``begin`` on of the flat gradient into ``row``.

    Padding and parameters without a gradient are skipped.
    """
    for parameter, offset, start, end in _overlaps(parameters, offsets, begin, begin + row.numel()):
        if parameter.grad is not None:
            row[start - begin : end - begin] = parameter.grad.reshape(-1)[start - offset : end - offset]


def _overlaps(
    parameters: Sequence[nn.Parameter], offsets: Sequence[int], begin: int, end: int
) -> Iterator[tuple[nn.Parameter, int, int, int]]:
    """Yields each parameter between ``begin`` and ``end`` of a flat tensor, its offset, and its range between them."""
    first, last = max(0, bisect.bisect_right(offsets, begin) - 1), bisect.bisect_left(offsets, end)
    for parameter, offset in zip(parameters[first:last], offsets[first:last], strict=True):
        start, stop = max(begin, offset), min(end, offset + parameter.numel())
        if start < stop:
            yield parameter, offset, start, stop


# The norm of gradients, at ZeRO stages 1 and 2


def overflowed(zero: Any) -> bool:
    """Whether the optimizer has skipped its last update, because a gradient was not finite."""
    return bool(zero.overflow)


def replace_norm(zero: Any, norm: Callable[[], Tensor]) -> None:
    """Lets the optimizer use another norm of its gradients, without clipping by it."""
    zero.scaled_global_norm = lambda norm_type=2: norm()
    zero.clip_grad = 0.0


def leave_passes(zero: Any, norm: Callable[[], Tensor]) -> None:
    """Lets the optimizer see no backward pass. It updates with the gradients and the norm that it is given."""
    for hook in zero._grad_acc_hooks:
        hook.remove()
    zero._grad_acc_hooks.clear()
    replace_norm(zero, norm)
    zero.check_grad_overflow = True

    def check_overflow(partition_gradients: bool = True) -> None:
        zero.overflow = not math.isfinite(norm())

    zero.check_overflow = check_overflow


def count_in_norm(zero: Any, squares: Callable[[], float]) -> None:
    """Adds gradients outside of DeepSpeed to the norm and the overflow check of its optimizer.

    Args:
        zero: the optimizer of the DeepSpeed engine.
        squares: returns the sum of squares of the outside gradients in this step, with the loss scale; equal on all
            ranks.
    """
    # Bound methods: the replacements call the originals.
    original_norm, original_check = zero.scaled_global_norm, zero.check_overflow

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        norm = original_norm(norm_type)
        return torch.where(
            norm < 0, norm, (norm.square() + squares()).sqrt()
        )  # DeepSpeed returns a negative norm if a gradient is not finite

    def check_overflow(partition_gradients: bool = True) -> None:
        original_check(partition_gradients=partition_gradients)
        zero.overflow = zero.overflow or not math.isfinite(squares())

    zero.scaled_global_norm, zero.check_overflow = scaled_global_norm, check_overflow


# State of training


class Piece(NamedTuple):
    """The elements of a parameter in this rank's fp32 partition: ``flat[place : place + numel]``.

    Attributes:
        flat: weights in fp32. The optimizer's state has its moments under this key, of the same shape.
        place: of the first element in ``flat``.
        start: of the first element in the parameter.
        numel: without the padding to equal lengths on all ranks; at least 1.
    """

    flat: Tensor
    place: int
    start: int
    numel: int


def pieces(deepspeed: DeepSpeedEngine) -> dict[nn.Parameter, Piece]:
    """Finds the trained parameters with elements in this rank's partitions, at ZeRO stages 1 to 3.

    With ``round_robin_gradients`` DeepSpeed's own mapping (``_hp_mapping``) is wrong: it assumes the model's order.
    """
    zero = deepspeed.optimizer
    if deepspeed.zero_optimization_stage() == 3:
        return {
            parameter: Piece(zero.fp32_partitioned_groups_flat[group], begin, partition_start(parameter), numel)
            for parameter in deepspeed.module.parameters()
            if parameter.requires_grad
            for group, begin, padded in [zero.grad_position[zero.get_param_id(parameter)]]
            if (numel := partition_numel(parameter, padded)) > 0
        }
    return {
        parameter: Piece(flat, start - begin, start - offset, end - start)
        for flat, parameters, offsets, begin, _ in partitions(zero)
        for parameter, offset, start, end in _overlaps(parameters, offsets, begin, begin + flat.numel())
    }


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
