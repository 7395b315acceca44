"""The gradients of a rank's stages: summed, measured over all stages, and given to DeepSpeed's optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.config.run import RunConfig
from m6.training.engine.clipping import gradient_norm
from m6.training.engine.compressed import CompressedGradients
from m6.training.engine.handover import give_partition, take_gradient
from m6.training.engine.partitions import is_expert
from m6.training.mesh import Mesh, expert_group
from m6.training.reduction.buckets import buckets

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step whose passes have ended on this rank.

    Attributes:
        of_parameters: whole ones at ZeRO stage 0; none at stage 1, where DeepSpeed has this rank's partition.
        tensors: what clipping shrinks.
        squares: [P], the squared norm on each rank of the pipeline, in fp64, as soon as ``measured`` has ended.
        learning_rate: of the step.
    """

    of_parameters: dict[nn.Parameter, Tensor]
    tensors: list[Tensor]
    squares: Tensor
    measured: dist.Work
    learning_rate: float


class StageGradients:
    """Takes the place of DeepSpeed's reduction, of its norm and of its decision to skip a step (0.19.8).

    Args:
        mesh: of this rank.
        trained: the parameters of this rank.
        compressed: what sums the gradients where ``m6.communication`` leaves parts of them out.

    Attributes:
        trained: see above.
        norm: of the gradients of all stages in the next update, with the loss scale.
    """

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        config: RunConfig,
        mesh: Mesh,
        trained: list[nn.Parameter],
        compressed: CompressedGradients | None = None,
    ) -> None:
        self._compressed = compressed
        self.trained, self.norm = trained, torch.zeros((), device=mesh.device)
        self._deepspeed, self._mesh, self._device = deepspeed, mesh, mesh.device
        self._expert_group = expert_group("expert_parallel", mesh.dims.ep)
        self._same_experts = expert_group("expert_data_parallel", mesh.dims.ep) or mesh.replicas
        reduced_type = "fp32" if compressed is not None else config.deepspeed.keys.get("communication_data_type", "")
        self._reduced_type = _TYPES.get(reduced_type)
        self._zero = deepspeed.optimizer if config.deepspeed.zero_stage > 0 else None
        deepspeed.enable_backward_allreduce = False
        deepspeed.set_gradient_accumulation_boundary(True)  # each step of DeepSpeed is an update
        if self._zero is not None:
            self._take_over(self._zero)

    def collect(
        self, learning_rate: float, other_squares: float, group: dist.ProcessGroup | None, scale: float
    ) -> StepGradients:
        """Takes the gradients of a step out of the parameters; their norm is under way when this returns.

        Args:
            learning_rate, scale: of the step: the factor on its loss.
            other_squares: see ``gradient_norm``.
            group: the ranks of this pipeline.
        """
        gradients = self._all_reduce() if self._compressed is None else self._sums_of_parts(self._compressed, scale)
        experts = [gradient for parameter, gradient in gradients.items() if is_expert(parameter)]
        dense = [gradient for parameter, gradient in gradients.items() if not is_expert(parameter)]
        squares = torch.zeros(self._mesh.dims.pp, dtype=torch.float64, device=self._device)
        norm = gradient_norm(dense, experts, self._expert_group, self._device, other_squares)
        squares[self._mesh.dims.pp_rank] = norm.double().square()
        measured = dist.all_reduce(squares, group=group, async_op=True)
        for parameter in self.trained:
            parameter.grad = None
        if self._zero is None:
            return StepGradients(gradients, list(gradients.values()), squares, measured, learning_rate)
        return StepGradients({}, give_partition(self._zero, gradients), squares, measured, learning_rate)

    def _sums_of_parts(self, compressed: CompressedGradients, scale: float) -> dict[nn.Parameter, Tensor]:
        """What the ranks that hold the same parameters sent of their gradients, summed up."""
        # All stages ask each other: one that has nothing to compress must not go on alone.
        are_finite = compressed.are_finite({each: each.grad for each in self.trained if each.grad is not None})
        whole = compressed.leaves_nothing_out
        if whole:
            found = self._all_reduce()
        else:
            gradients = {parameter: take_gradient(parameter).div_(scale) for parameter in self.trained}
            found = {each: total.mul_(scale) for each, total in compressed.sums(gradients, are_finite).items()}
        compressed.end_step(reduced_elsewhere=whole)
        return found

    def _all_reduce(self) -> dict[nn.Parameter, Tensor]:
        """The gradients of this rank's parameters, summed over the ranks that hold the same ones."""
        gradients = {
            parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.trained
        }
        for of_experts, group in ((False, self._mesh.replicas), (True, self._same_experts)):
            chosen = [each for parameter, each in gradients.items() if is_expert(parameter) == of_experts]
            if dist.get_world_size(group) == 1:
                continue
            for bucket in buckets(chosen):
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                reduced = flat if self._reduced_type is None else flat.to(self._reduced_type)
                dist.all_reduce(reduced, group=group)
                for gradient, total in zip(bucket, reduced.split([each.numel() for each in bucket]), strict=True):
                    gradient.copy_(total.view_as(gradient))
        return gradients

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
