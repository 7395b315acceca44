"""The end of a step: summed gradients are clipped by their norm, and the optimizer updates the weights or skips.

With ``DelayedGradients`` it uses the gradients of the step before: W(t+1) = W(t) - lr u(g(W(t-1))) (arXiv 2006.09503,
section 3.2).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.checkpoints.format import LATE_GRADIENT
from m6.config.run import RunConfig
from m6.training.deepspeed_private import (
    LossScale,
    base_optimizer,
    count_in_norm,
    create_moments,
    expert_group,
    give_partition,
    leave_passes,
    overflowed,
    partition_pieces,
    publish_weights,
    replace_norm,
    sums_in_fp16,
)
from m6.training.engine.norms import PartGroups, clip_gradients, gradient_norm, partition_norm, shrink
from m6.training.mesh import Mesh

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from m6.training.offloading.experts import OffloadedExperts


class DelayedGradients:
    """The stored gradients of the last step, to be used at the end of the next step.

    Step t computes with W(t-1). This needs no second copy of the weights, because the gradient between W(t-1) and W(t)
    is stored instead. It is reduced, clipped and without loss scale, as DeepSpeed passes it to the optimizer. At ZeRO
    stages 1 and 2 it is this rank's partition. It is stored in the optimizer's state, so that checkpoints treat it like
    a moment.

    Attributes:
        learning_rate: the learning rate for the stored gradients, from their own step; None: nothing is stored.
    """

    def __init__(self, deepspeed: DeepSpeedEngine) -> None:
        self._deepspeed, self._optimizer = deepspeed, base_optimizer(deepspeed)
        # One permanent buffer for each parameter: DeepSpeed keeps views of the optimizer's state from the first step.
        self._buffers: dict[Tensor, Tensor] = {}
        self.learning_rate: float | None = None
        self._used = False

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """A context in which the optimizer's ``step`` applies the stored gradients and stores the new gradients."""
        self._make_room()
        optimizer, self._used = self._optimizer, False
        optimizer.step = self._exchange  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            del optimizer.step

    def end_step(self, learning_rate: float, skipped: bool) -> None:
        """Ends a step with this learning rate. A skipped step loses only its own gradients, not the stored ones."""
        if not skipped:
            self.learning_rate = learning_rate
            return
        if not self._used:  # DeepSpeed did not call the optimizer
            self.use()
        self._forget()

    def use(self) -> None:
        """Updates the weights with the stored gradients, if there are any. Call it between two steps."""
        if self.learning_rate is not None:
            self._update()
            self._forget()
            publish_weights(self._deepspeed)

    def expect(self, learning_rate: float) -> None:
        """Allocates room for the stored gradients of a checkpoint, before they are written into the fragments."""
        self._make_room()
        for parameter in self._parameters():
            self._optimizer.state[parameter][LATE_GRADIENT] = self._buffers[parameter]
        self.learning_rate = learning_rate

    def _make_room(self) -> None:
        create_moments(self._deepspeed)  # first: an optimizer creates its moments only for a parameter without state
        if not self._buffers:
            self._buffers = {parameter: torch.zeros_like(parameter) for parameter in self._parameters()}

    def _exchange(self) -> None:
        """Replaces the optimizer's step. ZeRO stages 1 and 2 call it separately for each parameter group."""
        arrived = {parameter: parameter.grad for parameter in self._parameters()}
        if self.learning_rate is not None:
            self._update()
        for parameter, gradient in arrived.items():
            buffer = self._buffers[parameter]
            self._optimizer.state[parameter][LATE_GRADIENT] = buffer
            # Zeros for an unused parameter, as DeepSpeed's sums over several ranks have.
            _ = buffer.zero_() if gradient is None else buffer.copy_(gradient)
        self._used = True

    def _update(self) -> None:
        """Runs the optimizer's own step with the stored gradients."""
        assert self.learning_rate is not None
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = self.learning_rate * group.get("lr_ratio", 1.0)
            for parameter in group["params"]:
                parameter.grad = self._optimizer.state[parameter].pop(LATE_GRADIENT)
        type(self._optimizer).step(self._optimizer)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            for parameter in group["params"]:
                parameter.grad = None

    def _forget(self) -> None:
        for parameter in self._parameters():
            self._optimizer.state[parameter].pop(LATE_GRADIENT, None)
        self.learning_rate = None

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class Update:
    """The result of an update; equal on all ranks.

    Attributes:
        grad_norm: norm of all gradients before clipping, without the loss scale; infinite or NaN if any gradient is.
        skipped: whether a gradient was not finite. Then no weight changed.
        loss_scale: of this step; 1 except in fp16.
        nonfinite_stages: ranks of the pipeline, with their layers, whose gradients were not finite.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float
    nonfinite_stages: tuple[str, ...] = ()


class Updater(ABC):
    """Updates the weights with the gradients of a step.

    Args:
        offloaded: experts in the store of ``offload``; their gradients count in the norm.

    Attributes:
        zero: DeepSpeed's optimizer at ZeRO stages 1 to 3; None: at stage 0.
        loss_scale: at ZeRO stages 1 to 3; None: at stage 0 there is none.
        delayed: the gradients of the last step, if updates are one step late.
    """

    def __init__(
        self, deepspeed: DeepSpeedEngine, config: RunConfig, mesh: Mesh, offloaded: OffloadedExperts | None
    ) -> None:
        self._deepspeed, self._device, self._offloaded = deepspeed, mesh.device, offloaded
        self.zero = deepspeed.optimizer if config.deepspeed.zero_stage > 0 else None
        self._max_norm = config.deepspeed.gradient_clipping
        self._part_groups = PartGroups(mesh.tensor, expert_group("expert_parallel", config.m6.training.ep_size))
        self.loss_scale = None if self.zero is None else LossScale(self.zero)
        self.delayed = _delayed_gradients(config, deepspeed)

    @abstractmethod
    def update(self, sums: dict[nn.Parameter, Tensor] | None, learning_rate: float) -> Update:
        """Updates the weights, or skips the step on all ranks if a gradient is not finite.

        Args:
            sums: the gradients of this rank's parameters, summed over ranks; None: DeepSpeed has the sums.
            learning_rate: of the step.
        """

    @property
    def scale(self) -> float:
        """The loss scale of the current step."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _offloaded_squares(self) -> float:
        """Measures the offloaded experts; returns the sum of squares of their gradients, with the loss scale."""
        return 0.0 if self._offloaded is None else self._offloaded.measure()

    def _optimize(self) -> None:
        with nullcontext() if self.delayed is None else self.delayed.exchanging():
            self._deepspeed.step()

    def _end_step(self, learning_rate: float, norm: float, scale: float, skipped: bool) -> None:
        """Ends a step after DeepSpeed's part."""
        if self.delayed is not None:
            self.delayed.end_step(learning_rate, skipped)
        if self._offloaded is not None:
            self._offloaded.update(learning_rate, norm, scale)


class ZeroUpdater(Updater):
    """Leaves norm, clipping and the decision to skip to DeepSpeed at ZeRO stages 1 to 3.

    Args:
        measures_sums: see ``GradientReducer.measures_sums``. Norm and clipping are then those of whole sums.
    """

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        config: RunConfig,
        mesh: Mesh,
        offloaded: OffloadedExperts | None,
        measures_sums: bool,
    ) -> None:
        super().__init__(deepspeed, config, mesh, offloaded)
        self._measures_sums = measures_sums
        self._norm = torch.zeros((), dtype=torch.float64, device=mesh.device)
        if self.zero is None:  # our own clipping adds the experts to the norm
            return
        if offloaded is not None:
            count_in_norm(self.zero, lambda: offloaded.squares)
        if measures_sums:
            # ``_give`` clips instead: the rounding of DeepSpeed's factor differs from our clipping at stage 0.
            replace_norm(self.zero, lambda: self._norm)

    def update(self, sums: dict[nn.Parameter, Tensor] | None, learning_rate: float) -> Update:
        """See ``Updater.update``."""
        squares, scale = self._offloaded_squares(), self.scale
        if sums is not None:
            self._give(sums, squares)
        if self.loss_scale is None:
            norm = clip_gradients(self._deepspeed.module, self._max_norm, self._part_groups, squares)
            skipped = not math.isfinite(norm)
            if skipped:
                self._deepspeed.module.zero_grad(set_to_none=True)  # DeepSpeed's step then updates nothing
            self._optimize()
        else:
            self._optimize()
            skipped = overflowed(self.zero)
            self.loss_scale.change(skipped)
            reported = self._deepspeed.get_global_grad_norm()
            # DeepSpeed reports no norm for a skipped step.
            norm = float("inf") if skipped or reported is None else float(reported)
        self._end_step(learning_rate, norm, scale, skipped)
        return Update(norm, skipped, scale)

    def _give(self, sums: dict[nn.Parameter, Tensor], offloaded_squares: float) -> None:
        """Stores summed gradients for DeepSpeed's update; at stage 1 only this rank's partition of them."""
        if self.zero is None:
            for parameter, gradient in sums.items():
                parameter.grad = gradient.to(parameter.dtype)
        else:
            if self._measures_sums:
                self._norm = gradient_norm(sums, self._part_groups, self._device, offloaded_squares)
                shrink(list(sums.values()), float(self._norm) / self.scale, self._max_norm)
            give_partition(self.zero, sums)
        self._deepspeed.set_gradient_accumulation_boundary(True)


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


class StageUpdater(Updater):
    """The norm covers the gradients of all stages of a pipeline. DeepSpeed sees neither passes nor sums."""

    def __init__(
        self, deepspeed: DeepSpeedEngine, config: RunConfig, mesh: Mesh, offloaded: OffloadedExperts | None
    ) -> None:
        super().__init__(deepspeed, config, mesh, offloaded)
        self._config, self._mesh = config, mesh
        self._norm = torch.zeros((), device=mesh.device)
        self._same_experts = expert_group("expert_data_parallel", mesh.dims.ep) or mesh.replicas
        deepspeed.enable_backward_allreduce = False
        deepspeed.set_gradient_accumulation_boundary(True)  # each step of DeepSpeed is an update
        if self.zero is not None:
            leave_passes(self.zero, lambda: self._norm)

    def update(self, sums: dict[nn.Parameter, Tensor] | None, learning_rate: float) -> Update:
        """See ``Updater.update``."""
        return self.apply(self.collect(sums, learning_rate, self._mesh.model))

    def collect(
        self, sums: dict[nn.Parameter, Tensor] | None, learning_rate: float, group: dist.ProcessGroup | None
    ) -> StepGradients:
        """Takes the summed gradients of a step. The all-reduce of their norm is in flight afterwards.

        Args:
            sums: of all trained parameters of this rank; None: DeepSpeed has this rank's partition.
            learning_rate: of the step.
            group: the ranks of this pipeline.
        """
        other_squares = self._offloaded_squares()
        if sums is None:
            pieces = list(partition_pieces(self.zero))
            copies = self._mesh.replicas, self._same_experts
            norm = partition_norm(pieces, copies, self._part_groups, self._device, other_squares)
            tensors = [gradient for _, gradient in pieces]
        else:
            if self.zero is not None and sums_in_fp16(self.zero):
                # A finite fp32 number may overflow in the optimizer's fp16 partition.
                sums = {parameter: gradient.half() for parameter, gradient in sums.items()}
            norm = gradient_norm(sums, self._part_groups, self._device, other_squares)
            tensors = list(sums.values()) if self.zero is None else give_partition(self.zero, sums)
        squares = torch.zeros(self._mesh.dims.pp, dtype=torch.float64, device=self._device)
        squares[self._mesh.dims.pp_rank] = norm.double().square()
        measured = dist.all_reduce(squares, group=group, async_op=True)
        whole = sums if sums is not None and self.zero is None else {}
        return StepGradients(whole, tensors, squares, measured, learning_rate)

    def apply(self, ended: StepGradients) -> Update:
        """Clips the gradients of a step and updates the weights, or skips the step."""
        ended.measured.wait()
        self._norm, scale = ended.squares.sum().sqrt(), self.scale
        norm = float(self._norm) / scale
        skipped = not math.isfinite(norm)
        shrink(ended.tensors, norm, self._max_norm)
        if not skipped:  # DeepSpeed's step otherwise updates nothing
            for parameter, gradient in ended.of_parameters.items():
                parameter.grad = gradient
        self._optimize()
        if self.loss_scale is not None:
            self.loss_scale.change(skipped)
        self._end_step(ended.learning_rate, norm, scale, skipped)
        finite = ended.squares.isfinite().tolist()
        nonfinite = (self._stages_of(place) for place, each in enumerate(finite) if not each)
        return Update(norm, skipped, scale, tuple(nonfinite))

    def _stages_of(self, pp_rank: int) -> str:
        assert self._config.pipeline is not None
        return self._config.pipeline.describe_rank(pp_rank, self._config.model.num_layers)


def _delayed_gradients(config: RunConfig, deepspeed: DeepSpeedEngine) -> DelayedGradients | None:
    if config.m6.gradient_delay is None:
        return None
    return DelayedGradients(deepspeed)
