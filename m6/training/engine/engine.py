"""The engine: the model on this rank, its optimizer and its offloaded experts, behind one interface."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from m6.architecture.sharing import Sharing
from m6.checkpoints.format import LATE_UPDATE, Fragment, WeightReader
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.errors import UserError
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.outputs import M6Output
from m6.model.stages import ModelStage
from m6.training import deepspeed_private
from m6.training.deepspeed_private import (
    LossScale,
    count_in_norm,
    expert_group,
    fragments,
    give_partition,
    is_expert,
    is_partitioned,
    named_expert_group,
    overflowed,
    replace_norm,
)
from m6.training.engine.clipping import PartGroups, clip_gradients, gradient_norm, shrink
from m6.training.engine.reducer import GradientReducer, PipelineGradients
from m6.training.mesh import Mesh
from m6.training.optimizers import DTYPES
from m6.training.replicas import Replicated
from m6.training.storages import storage_bytes

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from m6.training.engine.delayed_gradients import DelayedGradients
    from m6.training.engine.tensor import DividedMatrices
    from m6.training.offloading.experts import OffloadedExperts

LossFunction = Callable[[MicroBatch, M6Output], Tensor]
"""Maps a micro-batch and the model's output, both on the device, to the loss for ``accumulate``.

An engine may have the output in parts. Each part then has the auxiliary loss and the statistics of some layers, with
zeros for the other layers. One part has the losses of the targets."""


@dataclass(frozen=True)
class Update:
    """The result of an update; equal on all ranks.

    Attributes:
        grad_norm: norm of all gradients before clipping, without the loss scale; infinite or NaN if any gradient is.
        skipped: whether a gradient was not finite. Then no weight changed.
        loss_scale: of this step; 1 except in fp16.
        nonfinite_stages: pipeline stages with non-finite gradients, in words.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float
    nonfinite_stages: tuple[str, ...] = ()


class Engine:
    """A model under DeepSpeed's ZeRO, and its offloaded experts if there are any.

    The training loop, the checkpoints, the dry run and the measurements use only this class. Only files in this folder
    read DeepSpeed's internals. Every implementation (pipeline stages, tensor-parallel layers, delayed gradients) has
    the same public members and keeps these rules:

    - ``accumulate`` gets all micro-batches of a step, so that a pipeline can choose their order. It calls the loss
      function once per micro-batch, or once for each part of it, see ``LossFunction``. Dropout depends only on the
      micro-batch's seed and the layer.
    - ``update`` returns the same norm and the same decision to skip on every rank.
    - ``fragments`` yields this rank's part of the training state. A fragment has the parameter's name in the whole
      model and the offset in its global tensor. All ranks together yield every element at least once. Writing to a
      fragment changes the state; the writer then calls ``publish_weights``.
    - ``counters`` and ``load_counters`` carry all other state of the next step.

    Args:
        mesh: of this rank.
        sharing: the shared layers of the Pseudo model; None: the Real model.

    Attributes:
        module: the part of the model on this rank.
        offloaded: experts in the store of ``offload``; None if the run does not offload.
        averaged_over: gradients are summed over all ranks and divided by this number.
        replicas: the ranks with the same part of the model and other micro-batches; None: all.
    """

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        config: RunConfig,
        mesh: Mesh,
        offloaded: OffloadedExperts | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._deepspeed, self._config, self._sharing = deepspeed, config, sharing
        self._mesh, self._device = mesh, mesh.device
        self._zero_stage = config.deepspeed.zero_stage
        self._max_norm = config.deepspeed.gradient_clipping
        self._expert_group = expert_group("expert_parallel", config.m6.training.ep_size)
        self._part_groups = PartGroups(mesh.tensor, self._expert_group)
        self._divided = _divided_matrices(mesh, deepspeed.module)
        self._learning_rate = 0.0
        self._shares: tuple[int, ...] | None = None
        self.replicas = mesh.replicas
        self.module: M6ForConditionalGeneration = deepspeed.module
        self._at_once = config.m6.training.overlap_micro_batches
        self.offloaded = offloaded
        self._reducer = _reducer(config, mesh, self.module, offloaded)
        self._reduces_alone = deepspeed.enable_backward_allreduce
        self.averaged_over = 1 if self._reducer.measures_sums else mesh.dims.dp
        self._loss_scale = LossScale(deepspeed.optimizer) if self._zero_stage > 0 else None
        self._delayed = _delayed_gradients(config, deepspeed)
        # At stage 0 our own clipping adds the experts to the norm, see ``update``.
        if offloaded is not None and self._zero_stage > 0:
            count_in_norm(deepspeed.optimizer, lambda: offloaded.squares)
        self._norm = torch.zeros((), dtype=torch.float64, device=mesh.device)
        if self._reducer.measures_sums and self._zero_stage > 0:
            # ``_give`` clips instead: the rounding of DeepSpeed's factor differs from our clipping at stage 0.
            replace_norm(deepspeed.optimizer, lambda: self._norm)

    # A training step

    def begin_step(self, learning_rate: float, shares: tuple[int, ...] | None = None) -> None:
        """Begins a step with this learning rate.

        Args:
            shares: micro-batches of each rank along ``dp``; None: all have as many as this rank.
        """
        self._learning_rate, self._shares = learning_rate, shares
        if self._divided is not None:
            self._divided.forget()  # a checkpoint has been written
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_ratio", 1.0)
        if self.offloaded is not None:
            self.offloaded.begin(learning_rate)

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, seeds: Sequence[int]) -> None:
        """Accumulates the gradients of this rank's micro-batches of a step.

        Args:
            micro_batches: on any device; ``loss`` gets them on the engine's device.
            loss: see ``LossFunction``.
            seeds: one seed per micro-batch, for dropout.
        """
        self._deepspeed.enable_backward_allreduce = self._reduces_alone and not self._reducer.sums_here
        if self._reducer.sums_here:
            # Without a boundary DeepSpeed only accumulates: it reduces nothing.
            self._deepspeed.set_gradient_accumulation_boundary(False)
            for _ in self._each(micro_batches, loss, seeds):
                self._reducer.end_pass(self._passes(len(micro_batches)))
            return
        last = len(micro_batches) // self._at_once - 1
        # DeepSpeed's own count of micro-batches assumes a constant batch, but the batch may grow.
        self._deepspeed.set_gradient_accumulation_boundary(last == 0)
        for index in self._each(micro_batches, loss, seeds):
            if index < last:
                self._deepspeed.step()  # before the last micro-batch, DeepSpeed only counts
                self._deepspeed.set_gradient_accumulation_boundary(index + 1 == last)

    def _passes(self, own: int) -> tuple[int, ...]:
        """Returns the backward passes of each rank along ``dp`` in this step; this rank has ``own`` micro-batches."""
        shares = self._shares or (own,) * self._mesh.dims.dp
        return tuple(share // self._at_once for share in shares)

    def _each(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, seeds: Sequence[int]) -> Iterator[int]:
        """Runs the passes, and yields the index of each backward pass after it. Interleaved micro-batches share one."""
        self._deepspeed.train()
        for index in range(len(micro_batches) // self._at_once):
            own = slice(index * self._at_once, (index + 1) * self._at_once)
            batches = [batch.to(self._device) for batch in micro_batches[own]]
            losses = map(loss, batches, self._forward_all(batches, seeds[own]))
            self.backward(functools.reduce(operator.add, losses))
            yield index

    def _forward_all(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> list[M6Output]:
        """Runs the model on several interleaved micro-batches, see ``m6.model.stages``, or on a single micro-batch."""
        if len(batches) == 1:
            return [self.forward(batches[0], seeds[0])]
        return _forward_interleaved(self._deepspeed, batches, seeds, self._device)

    def forward(self, batch: MicroBatch, seed: int | None = None) -> M6Output:
        """Runs the model on a micro-batch on the engine's device; the output has no logits.

        Args:
            seed: for dropout. The masks then depend only on the seed and the layer.
        """
        output: M6Output = self._deepspeed(
            **batch.model_inputs(), labels=batch.labels, return_logits=False, dropout_seed=seed
        )
        return output

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradient of ``loss``, already normalised by the global batch."""
        # DeepSpeed would divide by the number of micro-batches, but the loss is already normalised by all targets.
        self._deepspeed.backward(loss, scale_wrt_gas=False)

    def update(self) -> Update:
        """Clips the gradients by their norm and updates the weights, or skips the step if a gradient is not finite."""
        sums = None
        if self._reducer.sums_here:
            sums = self._reducer.sums(self._scale, self.averaged_over)
        squares = 0.0 if self.offloaded is None else self.offloaded.measure()
        if sums is not None:
            self._give(sums, squares)
        self._reducer.end_step()
        return self._update(squares)

    @property
    def _scale(self) -> float:
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    def _give(self, sums: dict[nn.Parameter, Tensor], offloaded_squares: float) -> None:
        """Stores summed gradients for DeepSpeed's update; at stage 1 only this rank's partition of them."""
        if self._zero_stage == 0:
            for parameter, gradient in sums.items():
                parameter.grad = gradient.to(parameter.dtype)
        else:
            if self._reducer.measures_sums:
                self._norm = gradient_norm(sums, self._part_groups, self._device, offloaded_squares)
                shrink(list(sums.values()), float(self._norm) / self._scale, self._max_norm)
            give_partition(self._deepspeed.optimizer, sums)
        self._deepspeed.set_gradient_accumulation_boundary(True)

    def _update(self, squares: float) -> Update:
        """Clips and updates. ``squares`` is the sum of squares of the gradients of offloaded experts."""
        loss_scale = self._scale
        if self._loss_scale is None:
            norm = clip_gradients(self.module, self._max_norm, self._part_groups, squares)
            skipped = not math.isfinite(norm)
            if skipped:
                self.module.zero_grad(set_to_none=True)  # DeepSpeed's step then updates nothing
            self._optimize()
        else:
            self._optimize()
            skipped = overflowed(self._deepspeed.optimizer)
            self._loss_scale.change(skipped)
            reported = self._deepspeed.get_global_grad_norm()
            # DeepSpeed reports no norm for a skipped step.
            norm = float("inf") if skipped or reported is None else float(reported)
        if self._delayed is not None:
            self._delayed.end_step(self._learning_rate, skipped)
        if self.offloaded is not None:
            self.offloaded.update(self._learning_rate, norm, loss_scale)
        return Update(norm, skipped, loss_scale)

    def _optimize(self) -> None:
        with nullcontext() if self._delayed is None else self._delayed.exchanging():
            self._deepspeed.step()

    def use_delayed_gradients(self) -> None:
        """Updates the weights with the delayed gradients of the last step, if there are any."""
        if self._delayed is not None:
            self._delayed.use()
        if self.offloaded is not None:
            self.offloaded.runtime.use_delayed_gradients()

    def interval_metrics(self) -> dict[str, Any]:
        """Entries of metrics.jsonl since the last call. Every rank calls it once in a log interval."""
        return self._reducer.interval_metrics()

    def measuring(self) -> AbstractContextManager[Any]:
        """A context around a step, to measure the memory for the plan of offloaded experts."""
        return nullcontext() if self.offloaded is None else self.offloaded.measuring(self._resident_tensors)

    def replan(self, root: Path, step: int) -> str | None:
        """Adapts the placement of offloaded experts to the measurements of the finished step.

        Args:
            root: the run's folder, for the memory record.
            step: the number of the finished step.

        Returns:
            the new memory map as text; None if the placement did not change.
        """
        return None if self.offloaded is None else self.offloaded.replan(root, step)

    # Between steps

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for forward passes outside of a training step: without dropout, and outside of the offload plan."""
        was_training = self.module.training
        self._deepspeed.eval()
        try:
            with nullcontext() if self.offloaded is None else self.offloaded.runtime.evaluating():
                yield
        finally:
            self._deepspeed.train(was_training)

    def memory_map(self) -> str | None:
        """Returns the placement of offloaded experts as text; None if the run does not offload."""
        return None if self.offloaded is None else self.offloaded.memory_map()

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank between two steps, on the device and on the host.

        Returns:
            ``weights`` (including buffers), ``optimizer_state`` (including fp32 masters), and, if experts are
            offloaded, ``experts``: their weights and optimizer state.
        """
        num_bytes = {part: storage_bytes(*tensors) for part, tensors in self.state_tensors().items()}
        if self.offloaded is not None:
            num_bytes["experts"] = self.offloaded.state_bytes
        return num_bytes

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """The tensors of ``weights`` and ``optimizer_state``; some of them may share storage."""
        moments = deepspeed_private.moments(self._deepspeed)
        masters = deepspeed_private.fp32_masters(self._deepspeed)
        return {"weights": deepspeed_private.weights(self._deepspeed), "optimizer_state": [*moments, *masters]}

    def gradient_bytes(self) -> int:
        """Bytes of this rank's gradients; call it between the last micro-batch of a step and its update."""
        return storage_bytes(*deepspeed_private.gradients(self._deepspeed))

    # Checkpoints and replicas

    def replicated(self) -> Iterator[Replicated]:
        """Yields this rank's weights with copies on other ranks. Partitions of ZeRO stage 3 have no copies."""
        copies = self.replicas if self._divided is None else self._divided.stage
        for name, parameter in self.module.named_parameters():
            if not is_partitioned(parameter):
                group = self.replicas if hasattr(parameter, "shard") else copies
                if is_expert(parameter):
                    group = named_expert_group("expert_data_parallel", parameter.group_name)  # type: ignore[attr-defined]
                yield Replicated(name, parameter.data, group)
        saved = self.module.state_dict(keep_vars=True)  # other buffers are not persistent
        yield from (Replicated(name, each, copies) for name, each in self.module.named_buffers() if name in saved)
        if self.offloaded is not None:
            yield from self.offloaded.replicated()

    @property
    def tensor_names(self) -> set[str]:
        """The names of all parameters and buffers in a checkpoint of this model."""
        names = {name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        return names if self.offloaded is None else names | self.offloaded.names

    def fragments(self, to_fill: bool = False) -> Iterator[Fragment]:
        """Yields this rank's training state: fp32 weights and the optimizer's moments, also before the first step.

        Args:
            to_fill: whether the caller writes into the fragments. Fragments of offloaded experts and sharded matrices
                are copies, to be written back. All ranks of a stage with sharded matrices call it together.
        """
        deepspeed_private.create_moments(self._deepspeed)
        found = fragments(self._deepspeed, self.replicas)
        yield from found if self._divided is None else self._divided.joined(found)
        if self.offloaded is not None:
            yield from self.offloaded.fragments(to_fill)

    def residual_fragments(self) -> Iterator[Fragment]:
        """Yields this rank's residuals: unsent gradients. They depend on the number of ranks."""
        yield from self._reducer.fragments()

    def load_residuals(self, reader: WeightReader) -> None:
        """Restores ``residual_fragments`` of a checkpoint of any number of ranks.

        Raises:
            UserError: the checkpoint has unsent gradients, and this engine would lose them.
        """
        self._reducer.load(reader)

    def publish_weights(self) -> None:
        """Copies weights from the fragments to the tensors of the forward pass; all ranks call it together."""
        if self._divided is not None:
            self._divided.take_back(fragments(self._deepspeed, self.replicas))
        deepspeed_private.publish_weights(self._deepspeed)

    @property
    def optimizer_step(self) -> int:
        """Number of the optimizer's updates, without skipped steps."""
        return deepspeed_private.optimizer_step(self._deepspeed)

    def counters(self) -> dict[str, Any]:
        """The state of the next step in addition to the fragments, as JSON."""
        counters: dict[str, Any] = {"optimizer_step": self.optimizer_step}
        scaler = {} if self._loss_scale is None else self._loss_scale.state()
        if scaler:
            counters["loss_scaler"] = scaler
        if self._delayed is not None and self._delayed.learning_rate is not None:
            experts = {} if self.offloaded is None else self.offloaded.delayed_update()
            counters[LATE_UPDATE] = {"learning_rate": self._delayed.learning_rate, **experts}
        return counters

    def expect(self, counters: dict[str, Any], checkpoint: str) -> None:
        """Allocates fragments for the delayed gradients of a checkpoint with these counters, if it has any.

        Args:
            checkpoint: the source, for the error message.

        Raises:
            UserError: the checkpoint has delayed gradients, and this engine would lose them.
        """
        waiting: dict[str, float] | None = counters.get(LATE_UPDATE)
        if waiting is None:
            return
        offloads = "experts_coefficient" in waiting
        if self._delayed is None or offloads != (self.offloaded is not None):
            section = "with" if offloads else "without"
            raise UserError(
                f"{checkpoint}: holds gradients that wait for the end of the next step, and this run would lose them; "
                f"go on with m6.gradient_delay and {section} m6.offload, or from a checkpoint of a finished run"
            )
        self._delayed.expect(waiting["learning_rate"])
        if self.offloaded is not None:
            self.offloaded.expect(waiting)

    def load_counters(self, counters: dict[str, Any], step: int) -> None:
        """Restores the counters of an engine after ``step`` steps."""
        deepspeed_private.set_optimizer_step(self._deepspeed, counters["optimizer_step"])
        if self.offloaded is not None:
            self.offloaded.runtime.num_updates = counters["optimizer_step"]
        if self._loss_scale is not None:
            self._loss_scale.load_state(counters.get("loss_scaler", {}))
        self._deepspeed.global_steps = step  # DeepSpeed's own counter must follow ours
        self._reducer.begin_at(step)

    def release(self) -> None:
        """Frees all memory of the engine. It cannot be used afterwards."""
        if self.offloaded is not None:
            self.offloaded.close()
        deepspeed_private.release(self._deepspeed)

    def _resident_tensors(self) -> list[Tensor]:
        """Returns all tensors before a step. It also allocates the optimizer's state, instead of the step."""
        deepspeed_private.create_moments(self._deepspeed)
        resident = [tensor for tensors in self.state_tensors().values() for tensor in tensors]
        return [*resident, *(p.grad for p in self.module.parameters() if p.grad is not None)]


def _forward_interleaved(
    deepspeed: DeepSpeedEngine, batches: Sequence[MicroBatch], seeds: Sequence[int], device: torch.device
) -> list[M6Output]:
    """Runs the model on interleaved micro-batches, to overlap computation with the exchange of tokens.

    Args:
        batches: on ``device``.
        seeds: for dropout, one for each micro-batch.
    """
    layers = ModelStage.whole(deepspeed.module)
    inputs = [(batch.model_inputs(), batch.labels) for batch in batches]
    # DeepSpeed's forward pass calls its module, with its autocast and with the hooks for its backward pass.
    vars(deepspeed.module)["forward"] = functools.partial(layers.forward_interleaved, inputs, seeds, device)
    try:
        outputs: list[M6Output] = deepspeed()
    finally:
        del vars(deepspeed.module)["forward"]
    return outputs


# What only some runs need is imported where it is chosen.


def _reducer(config: RunConfig, mesh: Mesh, module: nn.Module, offloaded: OffloadedExperts | None) -> GradientReducer:
    if config.m6.training.deterministic is not None:
        from m6.training.engine.tree_gradients import TreeGradients

        return TreeGradients(config, mesh, module, offloaded)
    if config.m6.communication.compresses:
        from m6.training.engine.compressed import CompressedGradients

        return CompressedGradients(config, mesh, module)
    if config.pipeline is not None:
        return PipelineGradients(mesh, module, DTYPES.get(config.deepspeed.keys.get("communication_data_type", "")))
    return GradientReducer(mesh, module)


def _divided_matrices(mesh: Mesh, module: nn.Module) -> DividedMatrices | None:
    if mesh.tensor is None:
        return None
    from m6.training.engine.tensor import DividedMatrices

    return DividedMatrices(mesh, module)


def _delayed_gradients(config: RunConfig, deepspeed: DeepSpeedEngine) -> DelayedGradients | None:
    if config.m6.gradient_delay is None:
        return None
    from m6.training.engine.delayed_gradients import DelayedGradients

    return DelayedGradients(deepspeed)
