"""How the gradients of a step become sums: the interface of all reducers, and the all-reduce of pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.checkpoints.format import WeightReader
from m6.checkpoints.fragment import Fragment
from m6.training.engine.partitions import is_expert
from m6.training.mesh import Mesh, expert_group
from m6.training.reduction.buckets import buckets
from m6.training.reduction.residuals import load_residuals


class GradientReducer:
    """Sums the gradients of this rank over the ranks that hold the same parameters. It knows no stages.

    Whoever runs micro-batches calls ``end_pass`` after each backward pass; the engine calls ``sums`` and then
    ``end_step``. This class leaves all sums to DeepSpeed, so that its ``sums`` is never called.

    Args:
        mesh: of this rank.
        module: the part of the model on this rank.

    Attributes:
        trained: the parameters of this rank that get gradients.
        measures_sums: whether norm and clipping are those of the sums as this object returns them, and the loss needs
            no factor for a mean over ranks. DeepSpeed's norm is that of partitions, whose borders depend on the number
            of ranks.
    """

    measures_sums = False

    def __init__(self, mesh: Mesh, module: nn.Module) -> None:
        self._mesh = mesh
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    @property
    def sums_here(self) -> bool:
        """Whether this object sums the gradients of the current step, and DeepSpeed does not."""
        return False

    def divide(self, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        """Expects the passes of each of these parts of the parameters by themselves.

        A parameter may be in two parts. A part may have a parameter that is not in ``trained``; ``sums`` then returns
        that, too.
        """

    def end_pass(self, passes: tuple[int, ...], part: int = 0) -> None:
        """Ends a backward pass, of one micro-batch or of those that take turns.

        Args:
            passes: of the step, on each rank along ``dp``.
            part: whose gradients are complete, see ``divide``.
        """

    def sums(self, loss_scale: float, averaged_over: int) -> dict[nn.Parameter, Tensor]:
        """Moves the gradients of a step out of the parameters, and returns their sums over ranks, with the loss scale.

        They are infinite or NaN everywhere if a gradient of any rank is.

        Args:
            averaged_over: a further factor on the loss, which the sums do not have.
        """
        raise NotImplementedError

    def end_step(self) -> None:
        """Ends a step, whose gradients may have been summed elsewhere."""

    # Between steps

    def interval_metrics(self) -> dict[str, Any]:
        """See ``Engine.interval_metrics``."""
        return {}

    def fragments(self) -> Iterator[Fragment]:
        """See ``Engine.residual_fragments``."""
        yield from ()

    def load(self, reader: WeightReader) -> None:
        """See ``Engine.load_residuals``."""
        load_residuals(reader, {}, self._mesh.dims.dp_rank, self._mesh.dims.dp)

    def begin_at(self, step: int) -> None:
        """Goes on after ``step`` steps."""


class AllReducedGradients(GradientReducer):
    """All-reduces gradients in their own type, or in another one, where DeepSpeed does not see the passes.

    Args:
        sent_type: of the numbers in messages; None: that of the gradients.
    """

    def __init__(self, mesh: Mesh, module: nn.Module, sent_type: torch.dtype | None) -> None:
        super().__init__(mesh, module)
        self._sent_type = sent_type
        self._same_experts = expert_group("expert_data_parallel", mesh.dims.ep) or mesh.replicas

    def sums(self, loss_scale: float, averaged_over: int) -> dict[nn.Parameter, Tensor]:
        """See ``GradientReducer.sums``; only where ``averaged_over`` is 1."""
        assert averaged_over == 1
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
                reduced = flat if self._sent_type is None else flat.to(self._sent_type)
                dist.all_reduce(reduced, group=group)
                for gradient, total in zip(bucket, reduced.split([each.numel() for each in bucket]), strict=True):
                    gradient.copy_(total.view_as(gradient))
        for parameter in self.trained:
            parameter.grad = None
        return gradients
