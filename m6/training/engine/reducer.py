"""Gradient reduction: the interface of all reducers, and the sums of pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from m6.checkpoints.format import Fragment, WeightReader
from m6.training.deepspeed_private import expert_group, is_expert, scatter_sums
from m6.training.mesh import Mesh
from m6.training.reduction.collectives import CountedCollectives


class GradientReducer:
    """Sums the gradients of this rank over the ranks with the same parameters.

    It does not know pipeline stages, only the parts given to ``divide``.

    The engine calls ``end_pass`` after each backward pass, then ``sums`` and ``end_step``. In this class DeepSpeed
    computes all sums, so ``sums`` is never called.

    Args:
        mesh: of this rank.
        module: the part of the model on this rank.

    Attributes:
        trained: the trained parameters of this rank.
        measures_sums: whether norm and clipping use the result of ``sums``, and the loss needs no factor for a mean
            over ranks. DeepSpeed instead sums the norms of partitions; their borders depend on the number of ranks.
    """

    measures_sums = False

    def __init__(self, mesh: Mesh, module: nn.Module) -> None:
        self._mesh = mesh
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    @property
    def sums_here(self) -> bool:
        """Whether this object, and not DeepSpeed, sums the gradients of the current step."""
        return False

    def divide(self, parts: Sequence[Sequence[nn.Parameter]]) -> None:
        """Declares parts of the parameters with separate passes, such as the stages of a pipeline.

        A parameter may be in two parts. A part may have a parameter outside ``trained``; ``sums`` then returns it, too.
        """

    def end_pass(self, passes: tuple[int, ...], part: int = 0) -> None:
        """Ends a backward pass, of one micro-batch or of several interleaved micro-batches.

        Args:
            passes: the number of passes of the step on each rank along ``dp``.
            part: the part with complete gradients, see ``divide``.
        """

    def sums(self, loss_scale: float, averaged_over: int) -> dict[nn.Parameter, Tensor]:
        """Moves the gradients of a step out of the parameters, and returns their sums over ranks, with the loss scale.

        If a gradient of any rank is infinite or NaN, so are the sums on all ranks.

        Args:
            averaged_over: another factor on the loss; the sums do not contain it.
        """
        raise NotImplementedError

    def scatter(self, zero: Any) -> bool:
        """At ZeRO stage 1 sums gradients into this rank's partition only, instead of ``sums``, if the reducer can.

        Args:
            zero: DeepSpeed's optimizer. It gets the partition.

        Returns:
            whether it did; otherwise nothing happened.
        """
        return False

    def end_step(self) -> None:
        """Ends a step, also if DeepSpeed summed its gradients."""

    # Between steps

    def interval_metrics(self) -> dict[str, Any]:
        """See ``Engine.interval_metrics``."""
        return {}

    def fragments(self) -> Iterator[Fragment]:
        """See ``Engine.residual_fragments``."""
        yield from ()

    def load(self, reader: WeightReader) -> None:
        """See ``Engine.load_residuals``."""
        from m6.training.reduction.reducer import load_residuals

        load_residuals(reader, {}, self._mesh.dims.dp_rank, self._mesh.dims.dp)

    def begin_at(self, step: int) -> None:
        """Continues after ``step`` steps."""


class PipelineGradients(GradientReducer):
    """All-reduces gradients, or at ZeRO stage 1 reduce-scatters them, if DeepSpeed does not see the passes.

    On several nodes with the same number of ranks the sums are node-first, see ``CountedCollectives``.

    Args:
        sent_type: the number format of messages; None: the type of the gradients.

    Attributes:
        dense, experts: the collectives of the ranks with the same dense parts, and with the same experts.
    """

    def __init__(self, mesh: Mesh, module: nn.Module, sent_type: torch.dtype | None) -> None:
        super().__init__(mesh, module)
        self._sent_type = sent_type
        copies, of_experts = mesh.dims.ranks("dp"), mesh.dims.copies_of_experts()
        self.dense = CountedCollectives(mesh.replicas, mesh.by_nodes(copies), mesh.ring_between_nodes(copies))
        same_experts = expert_group("expert_data_parallel", mesh.dims.ep)
        self.experts = self.dense
        if same_experts is not None:
            self.experts = CountedCollectives(
                same_experts, mesh.by_nodes(of_experts), mesh.ring_between_nodes(of_experts)
            )

    def sums(self, loss_scale: float, averaged_over: int) -> dict[nn.Parameter, Tensor]:
        """See ``GradientReducer.sums``; only for ``averaged_over`` 1."""
        assert averaged_over == 1
        gradients = {
            parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.trained
        }
        for of_experts, collectives in ((False, self.dense), (True, self.experts)):
            chosen = [each for parameter, each in gradients.items() if is_expert(parameter) == of_experts]
            if collectives.ranks > 1:
                for gradient, total in zip(chosen, collectives.sums(chosen, self._sent_type), strict=True):
                    gradient.copy_(total)
        for parameter in self.trained:
            parameter.grad = None
        return gradients

    def scatter(self, zero: Any) -> bool:
        """See ``GradientReducer.scatter``."""
        scatter_sums(zero, self._reduce_scatter, self._sent_type)
        return True

    def _reduce_scatter(self, rows: Tensor, of_experts: bool) -> Tensor:
        return (self.experts if of_experts else self.dense).reduce_scatter(rows)
