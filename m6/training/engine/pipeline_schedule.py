"""Schedules of ``torch.distributed.pipelining`` (PyTorch 2.13) over micro-batches with different numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from m6.config.pipeline import PipelineSettings

_SCHEDULES: dict[str, Callable[..., Any]] = {
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class NumberedStage(PipelineStage):
    """A stage with numbers of micro-batches as input. It looks up the data; every rank of the pipeline has all data.

    PyTorch's stage receives all micro-batches of a step into permanent buffers of one shape. This stage makes a buffer
    of the right shape for each message, and frees it after its use.

    Args:
        module: maps hidden states, except in the first stage, and ``number`` to hidden states or a loss [1].
        index, num_stages: of this stage.
        row: hidden states of one row, [1, S, D] on the meta device.
        shape: maps the number of a micro-batch to its number of rows and tokens in a row.
        group: the ranks of the pipeline.
        splits: whether a schedule may compute the gradients of inputs first and the gradients of weights later;
            otherwise it computes both together, at the earlier position.
        end_pass: called with the number of a micro-batch after its gradients are complete.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        row: Tensor,
        shape: Callable[[int], Sequence[int]],
        device: torch.device,
        group: dist.ProcessGroup | None,
        splits: bool,
        end_pass: Callable[[int], None],
    ) -> None:
        # The shapes are given, so PyTorch need not run the module once to find them.
        row = row.requires_grad_()
        inputs = () if index == 0 else (row,)
        super().__init__(
            module,
            index,
            num_stages,
            device,
            input_args=inputs,
            output_args=(row,),
            group=group,
            dw_builder=None if splits else _nothing_later,
        )
        self._shape, self._row, self._end_pass = shape, row, end_pass

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See PyTorch."""
        self._make_buffers(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See PyTorch."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _drop_buffers(self.args_recv_info[fwd_chunk_id])
        return output

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See PyTorch."""
        if not self.is_last:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """See PyTorch."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _drop_buffers(self.grad_recv_info[bwd_chunk_id])
        if full_backward or self.dw_builder is not None:
            self._end_pass(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See PyTorch."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if self.dw_builder is None:
            self._end_pass(bwd_chunk_id)

    def _make_buffers(self, infos: Any, number: int) -> None:
        for info in infos:
            if not info.is_root_arg:
                shape = (*self._shape(number), self._row.shape[-1])
                info.buffer = torch.empty(shape, dtype=self._row.dtype, device=self.device)


def _nothing_later() -> Callable[[], None]:
    return lambda: None


def _drop_buffers(infos: Any) -> None:
    for info in infos:
        info.buffer = None


def build_schedule(settings: PipelineSettings, stages: list[NumberedStage], micro_batches: int) -> Any:
    """Makes the schedule of a rank with these stages; its ``step`` gets ``number``, int64 [micro_batches]."""
    arguments = {"n_microbatches": micro_batches, "loss_fn": as_scalar, "scale_grads": False}
    of_rank = stages[0] if settings.stages_per_rank() == 1 else stages
    return _SCHEDULES[settings.schedule](of_rank, **arguments)


def as_scalar(loss: Tensor, number: Tensor) -> Tensor:
    """Returns the loss of a micro-batch as a scalar, from the last stage's output [1]."""
    # The last stage returns [1], because PyTorch cannot concatenate outputs without dimensions.
    return loss.sum()
