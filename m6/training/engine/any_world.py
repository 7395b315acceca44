"""The engine of ``"deterministic": "any_world"``: the same weights to the bit on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from m6.architecture.sharing import Sharing
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.errors import UserError
from m6.training.engine.clipping import gradient_norm, shrink
from m6.training.engine.engine import Engine, LossFunction, Update
from m6.training.engine.handover import give_partition, take_gradient
from m6.training.engine.partitions import is_expert
from m6.training.engine.tree_sum import BranchSum, TreeShape, sum_over_ranks
from m6.training.mesh import Mesh, ParallelDims, expert_group
from m6.training.offloading.experts import OffloadedExperts


class AnyWorldEngine(Engine):
    """Takes the gradients of each micro-batch, adds them up in the order of a fixed tree, and gives DeepSpeed the sum.

    DeepSpeed reduces nothing, and at stage 1 takes its partition of the sum. Norm and clipping are those of the whole
    gradient, which every rank has.
    """

    def __init__(
        self,
        deepspeed: Any,
        config: RunConfig,
        mesh: Mesh,
        offloaded: OffloadedExperts | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        check_device(config, mesh.device)
        super().__init__(deepspeed, config, mesh, offloaded, sharing)
        self.averaged_over = 1
        self._same_experts = expert_group("expert_data_parallel", mesh.dims.ep)
        self._trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if mesh.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is refused
            torch.use_deterministic_algorithms(True)
        deepspeed.enable_backward_allreduce = False
        if self._zero_stage > 0:
            self._norm = torch.zeros((), dtype=torch.float64, device=mesh.device)
            zero = deepspeed.optimizer
            zero.scaled_global_norm = lambda norm_type=2: self._norm
            zero.clip_grad = 0.0  # stage 0 would round another factor

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, seeds: Sequence[int]) -> None:
        """See ``Engine.accumulate``."""
        self._branch = BranchSum(tree_shape(len(micro_batches), self._mesh.dims).run)
        # DeepSpeed takes every micro-batch for one in the middle of a step: it keeps the gradients as they are.
        self._deepspeed.set_gradient_accumulation_boundary(False)
        for _ in self._each(micro_batches, loss, seeds):
            self._branch.add(self._take_gradients())

    def update(self) -> Update:
        """See ``Engine.update``."""
        gradients = self._sum()
        squares = 0.0
        if self.offloaded is not None:
            self.offloaded.runtime.put_gradients(gradients[len(self._trained) :])
            squares = self.offloaded.measure()
        self._give_gradients(gradients[: len(self._trained)], squares)
        self._deepspeed.set_gradient_accumulation_boundary(True)
        return self._update(squares)

    def _sum(self) -> list[Tensor]:
        """The gradients of the global batch, in the order of ``_take_gradients``."""
        branch = self._branch.finish()
        found: dict[int, Tensor] = {}
        groups, size = self._mesh.dims.edp, self._mesh.dims.ep
        for of_experts in (False, True):
            # Without expert parallelism every rank has all experts.
            split = of_experts and self._same_experts is not None
            chosen = [index for index in range(len(branch)) if self._is_expert(index) == of_experts]
            order, group = ((groups, 1), self._same_experts) if split else ((groups, size), None)
            sums = sum_over_ranks([branch[index] for index in chosen], order, group, self._device)
            found |= dict(zip(chosen, sums, strict=True))
        return [found[index] for index in range(len(branch))]

    def _is_expert(self, index: int) -> bool:
        return index >= len(self._trained) or is_expert(self._trained[index])

    def _take_gradients(self) -> list[Tensor]:
        """Moves the gradients of a micro-batch out of the model, in fp32; zeros for what it did not use.

        First those of DeepSpeed's parameters, then those of offloaded experts.
        """
        taken = [take_gradient(parameter) for parameter in self._trained]
        return taken if self.offloaded is None else taken + self.offloaded.runtime.take_gradients()

    def _give_gradients(self, gradients: list[Tensor], offloaded_squares: float) -> None:
        """Puts the summed gradients where DeepSpeed's update reads them."""
        if self._zero_stage == 0:
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            return
        by_parameter = dict(zip(self._trained, gradients, strict=True))
        experts = [gradient for parameter, gradient in by_parameter.items() if is_expert(parameter)]
        dense = [gradient for parameter, gradient in by_parameter.items() if not is_expert(parameter)]
        self._norm = gradient_norm(dense, experts, self._expert_group, self._device, offloaded_squares)
        assert self._loss_scale is not None
        shrink(gradients, float(self._norm) / self._loss_scale.value, self._max_norm)
        give_partition(self._deepspeed.optimizer, by_parameter)


def check_device(config: RunConfig, device: torch.device) -> None:
    """Raises UserError if the model has an operation whose gradient has no fixed order on this device."""
    if device.type == "cuda" and config.model.patch_encoder == "resnet":
        raise UserError(
            'm6.training.deterministic "any_world": the gradient of max pooling, which m6.model.patch_encoder "resnet" '
            'needs, adds up in no fixed order on a GPU; use patch_encoder "linear", or leave one of them out'
        )


def tree_shape(micro_batches: int, dims: ParallelDims) -> TreeShape:
    """The tree of a step in which a rank has so many micro-batches."""
    return TreeShape(micro_batches * dims.edp, dims.edp, dims.ep)
