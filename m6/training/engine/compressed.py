"""Gradient compression (``m6.communication``): sums over ranks with fewer bytes than an all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.checkpoints.format import Fragment, WeightReader
from m6.config.run import RunConfig
from m6.training.deepspeed_private import is_expert, take_gradient
from m6.training.engine.norms import norms_of
from m6.training.engine.reducer import GradientReducer, PipelineGradients
from m6.training.mesh import Mesh
from m6.training.reduction.messages import ring_bytes
from m6.training.reduction.reducer import Reducer, gradient_tensor, load_residuals, residual_fragments
from m6.training.sizes import FP32

_FACTORS = "powersgd_q"


class CompressedGradients(GradientReducer):
    """Sums compressed gradients over ranks, and keeps the unsent rest of each rank as a residual.

    Residuals are in the units of the batch's gradient, without loss scale or number of ranks.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, module: nn.Module) -> None:
        super().__init__(mesh, module)
        self._whole = PipelineGradients(mesh, module, torch.float32)
        self._names = {each: name for name, each in module.named_parameters() if each.requires_grad}
        dense = {name: gradient_tensor(name, each) for each, name in self._names.items() if not is_expert(each)}
        self._collectives, self._same_experts = self._whole.dense, self._whole.experts
        like = torch.zeros((), device=mesh.device)
        self._reducer = Reducer(config.m6.communication, dense, self._collectives, like)
        split = sum(each.numel() for each in self._names if is_expert(each))
        self._expert_bytes = ring_bytes(split * FP32, self._same_experts.ranks)
        self._step = self._reported_step = 0
        self._has_sent = False  # by this object, in this step

    @property
    def sums_here(self) -> bool:
        """Whether this step sends parts of gradients or residuals.

        A step without compression and residuals must be bit-identical to a run without ``m6.communication``; therefore
        DeepSpeed sums its gradients. An all-reduce here could not do this: its order of additions depends on the
        position of an element in a message, and DeepSpeed's messages have another layout. DeepSpeed's messages are in
        fp32, like the messages of this class.
        """
        return not self._reducer.leaves_nothing_out(self._step)

    def sums(self, loss_scale: float, averaged_over: int) -> dict[nn.Parameter, Tensor]:
        """See ``GradientReducer.sums``. Residuals do not change if a gradient of any rank is not finite."""
        if not self.sums_here:
            # ``_are_finite`` is a collective of all stages: a stage without compression must take part in it.
            self._are_finite([each.grad for each in self.trained if each.grad is not None])
            self._has_sent = True
            return self._whole.sums(loss_scale, averaged_over)
        self._has_sent = True
        scale = averaged_over * loss_scale
        gradients = {parameter: take_gradient(parameter).div_(scale) for parameter in self.trained}
        if not self._are_finite(list(gradients.values())):
            return {parameter: gradient.fill_(torch.inf) for parameter, gradient in gradients.items()}
        experts = [parameter for parameter in gradients if is_expert(parameter)]
        dense = {self._names[each]: gradient for each, gradient in gradients.items() if not is_expert(each)}
        sums = self._reducer(dense, self._step)
        found = {parameter: sums[self._names[parameter]] for parameter in gradients if not is_expert(parameter)}
        of_experts = self._same_experts.sums([gradients[parameter] for parameter in experts])
        found |= dict(zip(experts, of_experts, strict=True))
        return {parameter: total.mul_(loss_scale) for parameter, total in found.items()}

    def _are_finite(self, gradients: list[Tensor]) -> bool:
        """Whether the gradients of all ranks of the run are finite. All ranks call it."""
        norms = norms_of(gradients) if gradients else torch.zeros(1, device=self._mesh.device)
        return not _on_any_rank(~torch.isfinite(norms))

    def end_step(self) -> None:
        """See ``GradientReducer.end_step``."""
        if not self._has_sent:
            self._collectives.count_ring(self._reducer.bytes_due(self._step)[1])
            self._same_experts.count_ring(self._expert_bytes)
        self._step, self._has_sent = self._step + 1, False

    def interval_metrics(self) -> dict[str, Any]:
        """Returns ``gradient_bytes``: the mean bytes sent by a rank in a step, and the bytes of a plain all-reduce.

        On several nodes also ``between_nodes``, the part sent to other nodes. See ``Engine.interval_metrics``.
        """
        steps, self._reported_step = max(1, self._step - self._reported_step), self._step
        sent = between_nodes = 0.0
        for counted in (self._collectives, self._same_experts):
            sent, counted.sent_bytes = sent + counted.sent_bytes, 0.0
            between_nodes, counted.sent_between_nodes = between_nodes + counted.sent_between_nodes, 0.0
        found = {"sent": sent / steps, "all_reduce": self._all_reduce_bytes()}
        if self._collectives.ring_between_nodes or self._same_experts.ring_between_nodes:
            found["between_nodes"] = between_nodes / steps
        return {"gradient_bytes": found}

    def _all_reduce_bytes(self) -> float:
        """Returns the bytes sent by a rank in a step without compression, including its experts."""
        return self._reducer.bytes_due(self._step)[1] + self._expert_bytes

    def fragments(self) -> Iterator[Fragment]:
        """See ``Engine.residual_fragments``."""
        dims = self._mesh.dims
        yield from residual_fragments(self._reducer.residuals, dims.dp_rank)
        for name, factors in self._reducer.factors().items():
            yield Fragment(name, _FACTORS, 0, factors.view(-1), tuple(factors.shape), (dims.dp_rank, dims.dp))

    def load(self, reader: WeightReader) -> None:
        """See ``Engine.load_residuals``."""
        dims, residuals = self._mesh.dims, self._reducer.residuals
        of_ranks: list[set[str]] = [set()] * dims.world_size
        dist.all_gather_object(of_ranks, set(residuals))
        load_residuals(reader, residuals, dims.dp_rank, dims.dp, set().union(*of_ranks))
        kept = [bool(each.any()) for each in residuals.values()]
        self._reducer.has_residuals = _on_any_rank(torch.tensor(kept, device=self._mesh.device))
        for name, factors in self._reducer.factors().items():
            if reader.shapes.get((name, _FACTORS)) == tuple(factors.shape):  # after a change of ``rank`` Q starts anew
                reader.read_into(name, _FACTORS, 0, factors.view(-1))

    def begin_at(self, step: int) -> None:
        """Continues after ``step`` steps."""
        self._step = self._reported_step = step


def _on_any_rank(flags: Tensor) -> bool:
    """Whether a flag is set on any rank. All ranks call it."""
    found = flags.any().float()
    dist.all_reduce(found)
    return bool(found)
