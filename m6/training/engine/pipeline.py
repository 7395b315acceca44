"""The runner of ``m6.parallel.pipeline``: stages of layers on different ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.attention import StateLayout
from m6.model.outputs import M6Output
from m6.model.slices import SliceCache
from m6.model.stages import ModelStage
from m6.training.engine.reducer import GradientReducer
from m6.training.engine.runner import Runner, Step
from m6.training.engine.updater import StageUpdater
from m6.training.mesh import Mesh

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


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
        shape: maps the number of a micro-batch to the shape of hidden states between stages, less the last dimension.
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


class PipelineRunner(Runner):
    """Runs a schedule of PyTorch over this rank's stages. Each stage calls the loss function with its part.

    DeepSpeed does not see the passes.

    The token embedding belongs to the first stage. If the last stage is on another rank, it has a copy for its logits.
    The copy is sent before each step, and its gradient is added to the gradient of the first stage.

    Args:
        splits: whether a schedule may split backward passes, see ``NumberedStage``.
    """

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        config: RunConfig,
        mesh: Mesh,
        reducer: GradientReducer,
        updater: StageUpdater,
        splits: bool,
    ) -> None:
        super().__init__(deepspeed, config, mesh, reducer, updater)
        assert config.pipeline is not None
        self._settings, self._splits, self._stage_updater = config.pipeline, splits, updater
        self._ends = mesh.of_ends("ends")
        self._trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._autocast = config.deepspeed.precision == "fp32" and config.deepspeed.product_dtype == "bf16"
        self._step: Step | None = None
        self._stages = self._build_stages()
        reducer.divide([[each for each in stage.parameters() if each.requires_grad] for stage in self._stages.values()])
        # Micro-batches of each pipeline in a step.
        self._scheduled = config.batch_split(mesh.dims.world_size).shares(config.deepspeed.train_batch_size)
        self._schedule = self._build_schedule()

    # A training step

    def accumulate(self, step: Step) -> None:
        """See ``Runner.accumulate``; the loss gets one part of each micro-batch from each stage of this rank."""
        self._deepspeed.train()
        self._send_table()
        if step.passes != self._scheduled:  # the batch has grown
            self._scheduled = step.passes
            self._schedule = self._build_schedule()
        self._step = self._prepared(step)
        numbers = torch.arange(len(self._step.batches))
        self._schedule.step(number=numbers, target=numbers, return_outputs=False)
        self._step = None
        self._end_passes()

    def _prepared(self, step: Step) -> Step:
        """Moves the inputs to the device."""
        return replace(step, batches=[batch.to(self._device) for batch in step.batches])

    def forward(self, batch: MicroBatch, seed: int | None) -> M6Output:
        """See ``Engine.forward``."""
        found, hidden_states = M6Output(), None
        for index, stage in self._stages.items():
            # In V schedules two neighbouring stages are on one rank.
            if index > 0 and index - 1 not in self._stages:
                shape = (*self._shape_of(batch), self._config.model.hidden_size)
                hidden_states = torch.empty(shape, dtype=self._dtype, device=self._device)
                dist.recv(hidden_states, self._rank_of(index - 1), group=self._mesh.model)
            hidden_states, output = self._run(stage, hidden_states, batch, seed)
            if stage.is_last:
                found = output
            elif index + 1 not in self._stages:
                dist.send(hidden_states.contiguous(), self._rank_of(index + 1), group=self._mesh.model)
        return found

    def begin_evaluation(self) -> None:
        """See ``Runner.begin_evaluation``."""
        self._send_table()

    # The stages

    @property
    def _dtype(self) -> torch.dtype:
        """The type of hidden states between stages."""
        return self._trained[0].dtype

    def _build_stages(self) -> dict[int, ModelStage]:
        """The stages of this rank, by their numbers in the pipeline."""
        config = self._config
        cut = self._settings.cut(config.model.num_layers)
        numbers = self._settings.stages_of(self._mesh.dims.pp_rank)
        self._copy: nn.Parameter | None = None
        self._table: nn.Parameter | None = None
        if 0 in numbers:
            self._table = self._module.model.embeddings.tokens.weight
        elif len(cut) - 1 in numbers:
            shape = (self._module.head.rows(config.model), config.model.hidden_size)
            copy = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._copy = self._table = nn.Parameter(copy, requires_grad=config.m6.lora is None)
        return {number: ModelStage(self._module, cut[number], self._table) for number in numbers}

    def _numbered_stages(self) -> list[NumberedStage]:
        shape = (1, self._config.m6.data.sequence_length, self._config.model.hidden_size)
        row = torch.empty(shape, dtype=self._dtype, device="meta")
        num_stages = len(self._settings.cut(self._config.model.num_layers))
        return [
            NumberedStage(
                _StageOfStep(stage, self._pass),
                index,
                num_stages,
                row,
                self._shape,
                self._device,
                self._mesh.model,
                self._splits,
                functools.partial(self._end_pass, part),
            )
            for part, (index, stage) in enumerate(self._stages.items())
        ]

    def _build_schedule(self) -> Any:
        """Makes the schedule of this pipeline for a step with ``_scheduled`` micro-batches."""
        return build_schedule(self._settings, self._numbered_stages(), self._scheduled[self._mesh.dims.dp_rank])

    def _shape(self, number: int) -> Sequence[int]:
        assert self._step is not None
        return self._shape_of(self._step.batches[number])

    def _shape_of(self, batch: MicroBatch) -> Sequence[int]:
        """The shape of hidden states between stages, without their last dimension."""
        layout: StateLayout = self._module.model.layout
        return layout.shape(*batch.input_ids.shape)

    def _rank_of(self, stage: int) -> int:
        """Returns the global rank of a stage of this pipeline."""
        dims = self._mesh.dims
        return dims.rank_of_stage(next(place for place in range(dims.pp) if stage in self._settings.stages_of(place)))

    def _run(
        self,
        stage: ModelStage,
        hidden_states: Tensor | None,
        batch: MicroBatch,
        seed: int | None,
        past: SliceCache | None = None,
    ) -> tuple[Tensor, M6Output]:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            found: tuple[Tensor, M6Output] = stage(hidden_states, batch.model_inputs(), batch.labels, seed, past)
        return found

    def _run_number(self, stage: ModelStage, hidden_states: Tensor | None, number: int) -> tuple[Tensor, M6Output]:
        assert self._step is not None
        return self._run(stage, hidden_states, self._step.batches[number], self._step.seeds[number])

    def _pass(self, stage: ModelStage, hidden_states: Tensor | None, number: int) -> Tensor:
        """Runs a forward pass of a training step; returns hidden states, or the loss [1] of the last stage."""
        step = self._step
        assert step is not None
        hidden_states, output = self._run_number(stage, hidden_states, number)
        # The product is not a view: PyTorch's schedules detach outputs in place, which a view does not allow.
        loss = step.loss(step.batches[number], output).reshape(1) * self._updater.scale
        if stage.is_last:
            return loss
        return _WithLoss.apply(hidden_states, loss) if loss.requires_grad else hidden_states

    # Gradients

    def _send_table(self) -> None:
        """Sends the token embedding to the rank of the last stage."""
        if self._ends is not None and self._has_copy:
            assert self._table is not None
            dist.broadcast(self._table.data, self._mesh.stage_ends[0], group=self._ends)

    def _end_pass(self, part: int, number: int) -> None:
        """Ends the backward pass of a micro-batch in a stage. In each stage the numbers of micro-batches increase.

        Args:
            part: the index of the stage among this rank's stages.
            number: of the micro-batch in the step.
        """
        self._reducer.end_pass(self._scheduled, part)

    def _end_passes(self) -> None:
        """Ends all passes of a step, and adds the gradient of the copy to the gradient of the token embedding."""
        if not self._reducer.measures_sums and self._has_trained_copy:
            assert self._table is not None
            self._table.grad = self._joined(self._table.grad)

    def _sums(self) -> dict[nn.Parameter, Tensor] | None:
        """See ``Runner._sums``."""
        zero, sums = self._updater.zero, None
        if zero is None or not self._reducer.scatter(zero):
            sums = self._reducer.sums(self._updater.scale, self.averaged_over)
        if sums is not None and self._reducer.measures_sums and self._has_trained_copy:
            # Both gradients are first summed over all pipelines and then added. A sum inside each pipeline first would
            # depend on the number of pipelines.
            assert self._table is not None
            joined = self._joined(sums.pop(self._table))
            if joined is not None:
                sums[self._table] = joined
        self._reducer.end_step()
        return sums

    @property
    def _has_trained_copy(self) -> bool:
        """Whether this rank has a trained token embedding with a copy on another rank, or the copy."""
        return self._ends is not None and self._has_copy and self._table is not None and self._table.requires_grad

    def _joined(self, gradient: Tensor | None) -> Tensor | None:
        """Adds the gradients of the copy and of the token embedding; None on the rank of the copy."""
        assert self._table is not None
        if gradient is None:
            gradient = torch.zeros_like(self._table)
        dist.reduce(gradient, self._mesh.stage_ends[0], group=self._ends)
        return None if self._copy is not None else gradient

    @property
    def _has_copy(self) -> bool:
        return not self._settings.is_v


class _StageOfStep(nn.Module):
    """A stage with the interface of PyTorch's schedules; its input is the number of a micro-batch."""

    def __init__(self, stage: ModelStage, run: Callable[[ModelStage, Tensor | None, int], Tensor]) -> None:
        super().__init__()
        self.stage, self._run = stage, run

    def forward(self, hidden_states: Tensor | None = None, *, number: Tensor) -> Tensor:
        """See ``NumberedStage``."""
        return self._run(self.stage, hidden_states, int(number))


class _WithLoss(torch.autograd.Function):
    """Attaches a loss [1] to hidden states. The backward pass gives the loss the gradient 1. The loss is not sent."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, loss: Tensor) -> Tensor:
        """Returns a copy of ``hidden_states``."""
        ctx.dtype = loss.dtype
        return hidden_states.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of both."""
        return grads[0], torch.ones(1, dtype=ctx.dtype, device=grads[0].device)
