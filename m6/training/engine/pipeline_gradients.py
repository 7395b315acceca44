"""The summed gradients of a rank's stages: their norm over all stages, and their way into DeepSpeed's optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.config.run import RunConfig
from m6.training.engine.clipping import PartGroups, gradient_norm, partition_norm
from m6.training.engine.partitions import give_partition, partition_pieces
from m6.training.mesh import Mesh, expert_group

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step after its last pass on this rank.

    Attributes:
        of_parameters: whole gradients at ZeRO stage 0; empty at stage 1, because DeepSpeed has this rank's partition.
        tensors: the tensors to clip.
        squares: [P], the squared norm on each rank of the pipeline, in fp64; valid after ``measured``.
        measured: the all-reduce of ``squares``, in flight.
        learning_rate: of the step.
    """

    of_parameters: dict[nn.Parameter, Tensor]
    tensors: list[Tensor]
    squares: Tensor
    measured: dist.Work
    learning_rate: float


class StageGradients:
    """Replaces DeepSpeed's norm and its decision to skip a step (0.19.8).

    Args:
        mesh: of this rank.

    Attributes:
        norm: the norm of the gradients of all stages for the next update, with the loss scale.
    """

    def __init__(self, deepspeed: DeepSpeedEngine, config: RunConfig, mesh: Mesh) -> None:
        self.norm = torch.zeros((), device=mesh.device)
        self._mesh, self._device = mesh, mesh.device
        self._part_groups = PartGroups(mesh.tensor, expert_group("expert_parallel", mesh.dims.ep))
        self._same_experts = expert_group("expert_data_parallel", mesh.dims.ep) or mesh.replicas
        self._zero = deepspeed.optimizer if config.deepspeed.zero_stage > 0 else None
        deepspeed.enable_backward_allreduce = False
        deepspeed.set_gradient_accumulation_boundary(True)  # each step of DeepSpeed is an update
        if self._zero is not None:
            self._take_over(self._zero)

    def collect(
        self,
        gradients: dict[nn.Parameter, Tensor] | None,
        learning_rate: float,
        other_squares: float,
        group: dist.ProcessGroup | None,
    ) -> StepGradients:
        """Takes the summed gradients of a step. The all-reduce of their norm is in flight afterwards.

        Args:
            gradients: of all trained parameters of this rank; None: DeepSpeed has this rank's partition.
            learning_rate: of the step.
            other_squares: see ``gradient_norm``.
            group: the ranks of this pipeline.
        """
        if gradients is None:
            pieces = list(partition_pieces(self._zero))
            copies = self._mesh.replicas, self._same_experts
            norm = partition_norm(pieces, copies, self._part_groups, self._device, other_squares)
            tensors = [gradient for _, gradient in pieces]
        else:
            if self._zero is not None and self._zero.gradient_accumulation_dtype == torch.float16:
                # A finite fp32 number may overflow in the optimizer's fp16 partition.
                gradients = {parameter: gradient.half() for parameter, gradient in gradients.items()}
            norm = gradient_norm(gradients, self._part_groups, self._device, other_squares)
            tensors = list(gradients.values()) if self._zero is None else give_partition(self._zero, gradients)
        squares = torch.zeros(self._mesh.dims.pp, dtype=torch.float64, device=self._device)
        squares[self._mesh.dims.pp_rank] = norm.double().square()
        measured = dist.all_reduce(squares, group=group, async_op=True)
        whole = gradients if gradients is not None and self._zero is None else {}
        return StepGradients(whole, tensors, squares, measured, learning_rate)

    def _take_over(self, zero: Any) -> None:
        for hook in zero._grad_acc_hooks:
            hook.remove()
        zero._grad_acc_hooks.clear()
        zero.clip_grad = 0.0
        zero.scaled_global_norm = lambda norm_type=2: self.norm
        zero.check_grad_overflow = True

        def check_overflow(partition_gradients: bool = True) -> None:
            zero.overflow = not math.isfinite(self.norm)

        zero.check_overflow = check_overflow
