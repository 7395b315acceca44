"""The engine: the model on this rank, its optimizer and its offloaded experts, behind one interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from m6.model.parameters import share_layers
from m6.training import deepspeed_private
from m6.training.deepspeed_private import is_expert, is_partitioned, named_expert_group
from m6.training.engine.fragments import fragments
from m6.training.engine.reducer import GradientReducer, PipelineGradients
from m6.training.engine.runner import LossFunction, PlainRunner, Runner, Step
from m6.training.engine.updater import StageUpdater, Update, Updater, ZeroUpdater
from m6.training.mesh import Mesh
from m6.training.optimizers import DTYPES
from m6.training.replicas import Replicated
from m6.training.sizes import storage_bytes

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from m6.training.engine.fragments import DividedMatrices
    from m6.training.engine.pipeline import PipelineRunner
    from m6.training.offloading.experts import OffloadedExperts


class Engine:
    """A model under DeepSpeed's ZeRO, and its offloaded experts if there are any.

    The training loop, the checkpoints, the dry run and the measurements use only this class. A runner decides in which
    order the passes of a step run, a reducer how gradients become sums, and an updater clips and updates. Each runner
    goes with each reducer, unless ``m6.config.combinations`` says why not.

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
        plain: the runner of a model without a pipeline.

    Attributes:
        module: the part of the model on this rank.
        offloaded: experts in the store of ``offload``; None if the run does not offload.
        runner: of the passes of a step.
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
        plain: type[PlainRunner] = PlainRunner,
    ) -> None:
        self._deepspeed, self._config, self._sharing, self._mesh = deepspeed, config, sharing, mesh
        self._divided = _divided_matrices(mesh, deepspeed.module)
        self._learning_rate = 0.0
        self._shares: tuple[int, ...] | None = None
        self.replicas = mesh.replicas
        self.module: M6ForConditionalGeneration = deepspeed.module
        self.offloaded = offloaded
        self._reducer = _reducer(config, mesh, self.module, offloaded)
        self._updater: Updater
        self.runner: Runner
        if config.pipeline is None:
            self._updater = ZeroUpdater(deepspeed, config, mesh, offloaded, self._reducer.measures_sums)
            self.runner = plain(deepspeed, config, mesh, self._reducer, self._updater)
        else:
            self._updater = updater = StageUpdater(deepspeed, config, mesh, offloaded)
            # A backward pass is not split in three cases. With activation checkpointing its second half would recompute
            # a block several times. Offloaded experts would be needed twice. A weight shared by layers would be
            # incomplete.
            splits = not config.m6.training.activation_checkpointing and offloaded is None and sharing is None
            self.runner = _pipeline_runner(config)(deepspeed, config, mesh, self._reducer, updater, splits)
        self.averaged_over = self.runner.averaged_over

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
        shares = self._shares or (len(micro_batches),) * self._mesh.dims.dp
        passes = tuple(share // self._config.m6.training.overlap_micro_batches for share in shares)
        self.runner.accumulate(Step(micro_batches, seeds, loss, passes, self._learning_rate))

    def forward(self, batch: MicroBatch, seed: int | None = None) -> M6Output:
        """Runs the model on a micro-batch on the engine's device; the output has no logits.

        All ranks of a pipeline call it. Only the rank of the last stage gets losses.

        Args:
            seed: for dropout. The masks then depend only on the seed and the layer.
        """
        return self.runner.forward(batch, seed)

    def advance(self) -> Update | None:
        """Ends the step before the newest one, if its passes end later than those of other steps begin.

        Returns:
            None if there is no such step, or if it has ended.
        """
        return self.runner.advance()

    def update(self) -> Update:
        """Clips the gradients by their norm and updates the weights, or skips the step if a gradient is not finite."""
        return self.runner.update(self._learning_rate)

    def use_delayed_gradients(self) -> None:
        """Updates the weights with the delayed gradients of the last step, if there are any."""
        if self._updater.delayed is not None:
            self._updater.delayed.use()
        if self.offloaded is not None:
            self.offloaded.runtime.use_delayed_gradients()

    def interval_metrics(self) -> dict[str, Any]:
        """Entries of metrics.jsonl since the last call. Every rank calls it once in a log interval."""
        return {**self._reducer.interval_metrics(), **self.runner.interval_metrics()}

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
        self.runner.begin_evaluation()
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
        if self._config.pipeline is not None:
            return names_of_all_stages(self._config, self._sharing)
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

    def own_fragments(self) -> Iterator[Fragment]:
        """As ``fragments``, but with shards of divided matrices as they are: a rank may call it without the others."""
        deepspeed_private.create_moments(self._deepspeed)
        yield from fragments(self._deepspeed, self.replicas)
        if self.offloaded is not None:
            yield from self.offloaded.fragments()

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
        scaler = {} if self._updater.loss_scale is None else self._updater.loss_scale.state()
        if scaler:
            counters["loss_scaler"] = scaler
        if self._updater.delayed is not None and self._updater.delayed.learning_rate is not None:
            experts = {} if self.offloaded is None else self.offloaded.delayed_update()
            counters[LATE_UPDATE] = {"learning_rate": self._updater.delayed.learning_rate, **experts}
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
        if self._updater.delayed is None or offloads != (self.offloaded is not None):
            section = "with" if offloads else "without"
            raise UserError(
                f"{checkpoint}: holds gradients that wait for the end of the next step, and this run would lose them; "
                f"go on with m6.gradient_delay and {section} m6.offload, or from a checkpoint of a finished run"
            )
        self._updater.delayed.expect(waiting["learning_rate"])
        if self.offloaded is not None:
            self.offloaded.expect(waiting)

    def load_counters(self, counters: dict[str, Any], step: int) -> None:
        """Restores the counters of an engine after ``step`` steps."""
        deepspeed_private.set_optimizer_step(self._deepspeed, counters["optimizer_step"])
        if self.offloaded is not None:
            self.offloaded.runtime.num_updates = counters["optimizer_step"]
        if self._updater.loss_scale is not None:
            self._updater.loss_scale.load_state(counters.get("loss_scaler", {}))
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


def names_of_all_stages(config: RunConfig, sharing: Sharing | None) -> set[str]:
    """The names of all parameters and buffers of the whole model."""
    with torch.device("meta"):
        whole = M6ForConditionalGeneration(config.model)
    if sharing is not None:
        share_layers(whole, sharing)
    return {name for name, _ in (*whole.named_parameters(), *whole.named_buffers())}


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
    from m6.training.engine.fragments import DividedMatrices

    return DividedMatrices(mesh, module)


def _pipeline_runner(config: RunConfig) -> type[PipelineRunner]:
    assert config.pipeline is not None
    if config.is_asynchronous:
        from m6.training.engine.async_pipeline import AsyncPipelineRunner

        return AsyncPipelineRunner
    if config.pipeline.slices is not None:
        from m6.training.engine.sliced_pipeline import SlicedPipelineRunner

        return SlicedPipelineRunner
    from m6.training.engine.pipeline import PipelineRunner

    return PipelineRunner
