"""The engine of ``m6.parallel.pipeline``: stages of layers on different ranks, inside DeepSpeed's ZeRO."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.architecture.sharing import Sharing
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.outputs import M6Output
from m6.model.parameters import share_layers
from m6.model.slices import SliceCache
from m6.model.stages import ModelStage
from m6.training.deepspeed_private import expert_group, give_partition, leave_passes, partition_pieces, sums_in_fp16
from m6.training.engine.clipping import PartGroups, gradient_norm, partition_norm, shrink
from m6.training.engine.engine import Engine, LossFunction, Update
from m6.training.engine.pipeline_schedule import NumberedStage, build_schedule
from m6.training.mesh import Mesh

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from m6.training.offloading.experts import OffloadedExperts


@dataclass
class Step:
    """The inputs of the current step. Every rank of the pipeline has all of them."""

    batches: Sequence[MicroBatch] = ()
    seeds: Sequence[int] = ()
    loss: LossFunction | None = None


class PipelineEngine(Engine):
    """Runs a schedule of PyTorch over this rank's stages. Each stage calls the loss function with its part.

    DeepSpeed neither sees the passes nor reduces gradients. At ZeRO stage 1 it takes its partition of the summed
    gradients. The norm and the clipping cover the gradients of all pipeline stages.

    The token embedding belongs to the first stage. If the last stage is on another rank, it has a copy for its logits.
    The copy is sent before each step, and its gradient is added to the gradient of the first stage.
    """

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        config: RunConfig,
        mesh: Mesh,
        offloaded: OffloadedExperts | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__(deepspeed, config, mesh, offloaded, sharing)
        assert config.pipeline is not None
        self.averaged_over = 1
        self._ends = mesh.of_ends("ends")
        self._trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._gradients = StageGradients(deepspeed, config, mesh)
        self._autocast = config.deepspeed.precision == "fp32" and config.deepspeed.product_dtype == "bf16"
        self._step = Step()
        self._stages = self._build_stages(config)
        self._reducer.divide(
            [[each for each in stage.parameters() if each.requires_grad] for stage in self._stages.values()]
        )
        # Micro-batches of each pipeline in a step.
        self._scheduled = config.batch_split(mesh.dims.world_size).shares(config.deepspeed.train_batch_size)
        self._schedule = self._build_schedule()

    # A training step

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, seeds: Sequence[int]) -> None:
        """See ``Engine.accumulate``; ``loss`` gets one part of each micro-batch from each stage of this rank."""
        self._deepspeed.train()
        self._send_table()
        passes = self._passes(len(micro_batches))
        if passes != self._scheduled:  # the batch has grown
            self._scheduled = passes
            self._schedule = self._build_schedule()
        self._step = self._begin(micro_batches, loss, seeds)
        numbers = torch.arange(len(self._step.batches))
        self._schedule.step(number=numbers, target=numbers, return_outputs=False)
        self._step = Step()
        self._end_passes()

    def _begin(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, seeds: Sequence[int]) -> Step:
        return Step([batch.to(self._device) for batch in micro_batches], seeds, loss)

    def forward(self, batch: MicroBatch, seed: int | None = None) -> M6Output:
        """See ``Engine.forward``. All ranks of a pipeline call it. Only the rank of the last stage gets losses."""
        found, hidden_states = M6Output(), None
        for index, stage in self._stages.items():
            # In V schedules two neighbouring stages are on one rank.
            if index > 0 and index - 1 not in self._stages:
                shape = (*batch.input_ids.shape, self._config.model.hidden_size)
                hidden_states = torch.empty(shape, dtype=self._dtype, device=self._device)
                dist.recv(hidden_states, self._rank_of(index - 1), group=self._mesh.model)
            hidden_states, output = self._run(stage, hidden_states, batch, seed)
            if stage.is_last:
                found = output
            elif index + 1 not in self._stages:
                dist.send(hidden_states.contiguous(), self._rank_of(index + 1), group=self._mesh.model)
        return found

    def update(self) -> Update:
        """See ``Engine.update``."""
        return self._apply(self._collect(self._learning_rate, self._mesh.model))

    def _apply(self, ended: StepGradients) -> Update:
        """Clips the gradients of a step and updates the weights, or skips the step."""
        ended.measured.wait()
        self._gradients.norm = ended.squares.sum().sqrt()
        scale = self._scale
        norm = float(self._gradients.norm) / scale
        skipped = not math.isfinite(norm)
        shrink(ended.tensors, norm, self._max_norm)
        if not skipped:  # DeepSpeed's step otherwise updates nothing
            for parameter, gradient in ended.of_parameters.items():
                parameter.grad = gradient
        self._optimize()
        if self._loss_scale is not None:
            self._loss_scale.change(skipped)
        if self._delayed is not None:
            self._delayed.end_step(ended.learning_rate, skipped)
        if self.offloaded is not None:
            self.offloaded.update(ended.learning_rate, norm, scale)
        finite = ended.squares.isfinite().tolist()
        nonfinite = (self._words(place) for place, each in enumerate(finite) if not each)
        return Update(norm, skipped, scale, tuple(nonfinite))

    def _words(self, pp_rank: int) -> str:
        assert self._config.pipeline is not None
        return self._config.pipeline.describe_rank(pp_rank, self._config.model.num_layers)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """See ``Engine.evaluating``."""
        self._send_table()
        with super().evaluating():
            yield

    # Checkpoints

    @property
    def tensor_names(self) -> set[str]:
        """The names of the whole model."""
        with torch.device("meta"):
            whole = M6ForConditionalGeneration(self._config.model)
        if self._sharing is not None:
            share_layers(whole, self._sharing)
        return {name for name, _ in (*whole.named_parameters(), *whole.named_buffers())}

    # The stages

    @property
    def _dtype(self) -> torch.dtype:
        """The type of hidden states between stages."""
        return self._trained[0].dtype

    def _build_stages(self, config: RunConfig) -> dict[int, ModelStage]:
        """The stages of this rank, by their numbers in the pipeline."""
        assert config.pipeline is not None
        cut = config.pipeline.cut(config.model.num_layers)
        numbers = config.pipeline.stages_of(self._mesh.dims.pp_rank)
        self._copy: nn.Parameter | None = None
        self._table: nn.Parameter | None = None
        if 0 in numbers:
            self._table = self.module.model.embeddings.tokens.weight
        elif len(cut) - 1 in numbers:
            shape = (config.model.vocab_size, config.model.hidden_size)
            copy = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._copy = self._table = nn.Parameter(copy, requires_grad=config.m6.lora is None)
        return {number: ModelStage(self.module, cut[number], self._table) for number in numbers}

    def _numbered_stages(self, config: RunConfig) -> list[NumberedStage]:
        assert config.pipeline is not None
        shape = (1, config.m6.data.sequence_length, config.model.hidden_size)
        row = torch.empty(shape, dtype=self._dtype, device="meta")
        num_stages = len(config.pipeline.cut(config.model.num_layers))
        # A backward pass is not split in three cases. With activation checkpointing its second half would recompute a
        # block several times. Offloaded experts would be needed twice. A weight shared by layers would be incomplete.
        training, offloaded = config.m6.training, self.offloaded
        splits = not training.activation_checkpointing and offloaded is None and self._sharing is None
        return [
            NumberedStage(
                _StageOfStep(stage, self._pass),
                index,
                num_stages,
                row,
                self._shape,
                self._device,
                self._mesh.model,
                splits,
                functools.partial(self._end_pass, part),
            )
            for part, (index, stage) in enumerate(self._stages.items())
        ]

    def _build_schedule(self) -> Any:
        """Makes the schedule of this pipeline for a step with ``_scheduled`` micro-batches."""
        assert self._config.pipeline is not None
        own = self._scheduled[self._mesh.dims.dp_rank]
        return build_schedule(self._config.pipeline, self._numbered_stages(self._config), own)

    def _shape(self, number: int) -> torch.Size:
        return self._step.batches[number].input_ids.shape

    def _rank_of(self, stage: int) -> int:
        """Returns the global rank of a stage of this pipeline."""
        assert self._config.pipeline is not None
        dims = self._mesh.dims
        return dims.rank_of_stage(
            next(place for place in range(dims.pp) if stage in self._config.pipeline.stages_of(place))
        )

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
        return self._run(stage, hidden_states, self._step.batches[number], self._step.seeds[number])

    def _pass(self, stage: ModelStage, hidden_states: Tensor | None, number: int) -> Tensor:
        """Runs a forward pass of a training step; returns hidden states, or the loss [1] of the last stage."""
        step = self._step
        assert step.loss is not None
        hidden_states, output = self._run_number(stage, hidden_states, number)
        # The product is not a view: PyTorch's schedules detach outputs in place, which a view does not allow.
        loss = step.loss(step.batches[number], output).reshape(1) * self._scale
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

    def _collect(self, learning_rate: float, group: dist.ProcessGroup | None) -> StepGradients:
        """Sums the gradients of a step over ranks, see ``StageGradients.collect``."""
        zero = self._deepspeed.optimizer if self._zero_stage > 0 else None
        sums = None
        if zero is None or not self._reducer.scatter(zero):
            sums = self._reducer.sums(self._scale, self.averaged_over)
        if sums is not None and self._reducer.measures_sums and self._has_trained_copy:
            # Both gradients are first summed over all pipelines and then added. A sum inside each pipeline first would
            # depend on the number of pipelines.
            assert self._table is not None
            joined = self._joined(sums.pop(self._table))
            if joined is not None:
                sums[self._table] = joined
        self._reducer.end_step()
        squares = 0.0 if self.offloaded is None else self.offloaded.measure()
        return self._gradients.collect(sums, learning_rate, squares, group)

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
        assert self._config.pipeline is not None
        return not self._config.pipeline.is_v


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
            leave_passes(self._zero, lambda: self.norm)

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
            if self._zero is not None and sums_in_fp16(self._zero):
                # A finite fp32 number may overflow in the optimizer's fp16 partition.
                gradients = {parameter: gradient.half() for parameter, gradient in gradients.items()}
            norm = gradient_norm(gradients, self._part_groups, self._device, other_squares)
            tensors = list(gradients.values()) if self._zero is None else give_partition(self._zero, gradients)
        squares = torch.zeros(self._mesh.dims.pp, dtype=torch.float64, device=self._device)
        squares[self._mesh.dims.pp_rank] = norm.double().square()
        measured = dist.all_reduce(squares, group=group, async_op=True)
        whole = gradients if gradients is not None and self._zero is None else {}
        return StepGradients(whole, tensors, squares, measured, learning_rate)
