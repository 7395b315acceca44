"""The engine of ``m6.communication``: gradients are summed over ranks by fewer bytes than an all-reduce takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m6.checkpoints.format import WeightReader
from m6.checkpoints.fragment import Fragment
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.planning.cost.gradient_bytes import ring_bytes
from m6.planning.cost.precision import FP32
from m6.training.engine.engine import Engine, LossFunction, Update
from m6.training.engine.handover import give_partition, take_gradient
from m6.training.engine.partitions import is_expert
from m6.training.engine.tensor_norms import norms_of
from m6.training.expert_groups import expert_group
from m6.training.offloading.experts import OffloadedExperts
from m6.training.reduction.collectives import CountedCollectives
from m6.training.reduction.reducer import Reducer, gradient_tensor
from m6.training.reduction.residuals import load_residuals, residual_fragments

_FACTORS = "powersgd_q"


class CompressedEngine(Engine):
    """Takes this rank's gradients of a step, and gives DeepSpeed their sums over ranks.

    DeepSpeed then reduces nothing, and at stage 1 takes its partition of the sums. It clips what was sent, as it clips
    sums of whole gradients. Residuals are in the units of the batch's gradient, without loss scale or number of ranks.

    In a step that leaves nothing out and has no residual to send, DeepSpeed reduces the gradients itself. Such a step
    is that of a run without compression to the bit, because an all-reduce adds up in an order that depends on where an
    element lies in a message, and DeepSpeed's messages are its own. They are in fp32, as ours.
    """

    def __init__(
        self, deepspeed: Any, config: RunConfig, device: torch.device, offloaded: OffloadedExperts | None
    ) -> None:
        super().__init__(deepspeed, config, device, offloaded)
        self._trained = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        dense = {name: gradient_tensor(name, each) for name, each in self._trained.items() if not is_expert(each)}
        self._collectives = CountedCollectives()
        like = torch.zeros((), device=device)
        self._reducer = Reducer(config.m6.communication, dense, self._collectives, like)
        self._same_experts = CountedCollectives(expert_group("expert_data_parallel", config.m6.training.ep_size))
        split = sum(each.numel() for each in self._trained.values() if is_expert(each))
        self._expert_bytes = ring_bytes(split * FP32, self._same_experts.ranks)
        self._step = self._reported_step = 0
        self._leaves_nothing_out = False
        self._reduces_alone = deepspeed.enable_backward_allreduce

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, seeds: Sequence[int]) -> None:
        """See ``Engine.accumulate``."""
        self._leaves_nothing_out = self._reducer.leaves_nothing_out(self._step)
        self._deepspeed.enable_backward_allreduce = self._leaves_nothing_out and self._reduces_alone
        if self._leaves_nothing_out:
            super().accumulate(micro_batches, loss, seeds)
            return
        # DeepSpeed takes every micro-batch for one in the middle of a step: it adds gradients up and reduces nothing.
        self._deepspeed.set_gradient_accumulation_boundary(False)
        for _ in self._each(micro_batches, loss, seeds):
            pass

    def update(self) -> Update:
        """See ``Engine.update``."""
        if self._leaves_nothing_out:
            self._collectives.sent_bytes += self._all_reduce_bytes()
        else:
            scale = self.averaged_over * (1.0 if self._loss_scale is None else self._loss_scale.value)
            gradients = {name: take_gradient(parameter).div_(scale) for name, parameter in self._trained.items()}
            self._give(self._reduce(gradients), scale / self.averaged_over)
            self._deepspeed.set_gradient_accumulation_boundary(True)
        self._step += 1
        return super().update()

    def _reduce(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums over ranks; infinite everywhere, with residuals as they were, if a gradient of a rank is."""
        norms = norms_of(list(gradients.values()))
        if _on_any_rank(~torch.isfinite(norms)):
            return {name: gradient.fill_(torch.inf) for name, gradient in gradients.items()}
        experts = [name for name in gradients if is_expert(self._trained[name])]
        sums = self._reducer({name: each for name, each in gradients.items() if name not in experts}, self._step)
        return sums | dict(zip(experts, self._same_experts.sums([gradients[name] for name in experts]), strict=True))

    def _give(self, gradients: dict[str, Tensor], loss_scale: float) -> None:
        """Puts the sums where DeepSpeed's update reads them."""
        if self._zero_stage == 0:
            for name, parameter in self._trained.items():
                parameter.grad = gradients[name].to(parameter.dtype)
            return
        scaled = {parameter: gradients[name].mul_(loss_scale) for name, parameter in self._trained.items()}
        give_partition(self._deepspeed.optimizer, scaled)

    def interval_metrics(self) -> dict[str, Any]:
        """``gradient_bytes``: what a rank sent in a step on average, and what an all-reduce of all gradients sends.

        See ``Engine.interval_metrics``.
        """
        steps, self._reported_step = max(1, self._step - self._reported_step), self._step
        sent = 0.0
        for counted in (self._collectives, self._same_experts):
            sent, counted.sent_bytes = sent + counted.sent_bytes, 0.0
        return {"gradient_bytes": {"sent": sent / steps, "all_reduce": self._all_reduce_bytes()}}

    def _all_reduce_bytes(self) -> float:
        """Bytes that a rank sends in a step for whole gradients, those of its experts included."""
        return self._reducer.bytes_due(self._step)[1] + self._expert_bytes

    def residual_fragments(self) -> Iterator[Fragment]:
        """See ``Engine.residual_fragments``."""
        yield from residual_fragments(self._reducer.residuals, dist.get_rank())
        replica = (dist.get_rank(), dist.get_world_size())
        for name, factors in self._reducer.factors().items():
            yield Fragment(name, _FACTORS, 0, factors.view(-1), tuple(factors.shape), replica)

    def load_residuals(self, reader: WeightReader) -> None:
        """See ``Engine.load_residuals``."""
        load_residuals(reader, self._reducer.residuals, dist.get_rank(), dist.get_world_size())
        kept = [bool(each.any()) for each in self._reducer.residuals.values()]
        self._reducer.has_residuals = _on_any_rank(torch.tensor(kept, device=self._device))
        for name, factors in self._reducer.factors().items():
            if reader.shapes.get((name, _FACTORS)) == tuple(factors.shape):  # another rank begins anew
                reader.read_into(name, _FACTORS, 0, factors.view(-1))

    def load_counters(self, counters: dict[str, Any], step: int) -> None:
        """See ``Engine.load_counters``."""
        super().load_counters(counters, step)
        self._step = self._reported_step = step


def _on_any_rank(flags: Tensor) -> bool:
    """Whether a flag is set on any rank; called on all."""
    found = flags.any().float()
    dist.all_reduce(found)
    return bool(found)
