"""The engine: the model on this rank, its optimizer, and everything that DeepSpeed keeps of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m6.checkpoints.fragment import Fragment
from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.outputs import M6Output
from m6.planning.cost.storages import storage_bytes
from m6.runs.processes import seed_everything
from m6.training.engine import state
from m6.training.engine.clipping import clip_gradients, count_in_norm
from m6.training.engine.fragments import fragments
from m6.training.expert_groups import expert_group
from m6.training.offloading.experts import OffloadedExperts

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

LossFunction = Callable[[MicroBatch, M6Output], Tensor]
"""The loss of a micro-batch on the device, of which ``accumulate`` takes the gradient."""


@dataclass(frozen=True)
class Update:
    """What the end of a step did; equal on all ranks.

    Attributes:
        grad_norm: of all gradients before clipping, without the loss scale; infinite or NaN if one of them was.
        skipped: the gradients were not finite, so no weight changed.
    """

    grad_norm: float
    skipped: bool


class Engine:
    """A model that DeepSpeed's ZeRO trains, with offloaded experts beside it if the run has them.

    The training loop, the checkpoints, the dry run and the measurements use this class alone: only the folder of this
    file reads DeepSpeed's internals. A second implementation (pipeline stages, tensor-parallel layers, delayed
    gradients) gives the same public members, with these promises:

    - ``accumulate`` takes all micro-batches of a step, so that a pipeline can order them as it likes. It calls the
      loss function once for each micro-batch, on the ranks that hold its output. Dropout depends on the seed of the
      micro-batch alone.
    - ``update`` returns the same norm and the same decision to skip on every rank.
    - ``fragments`` yields what this rank holds of the training state: by the parameter's name in the whole model and
      the offset in its global tensor. All ranks together yield every element at least once. Writing to a fragment
      changes the state, and ``publish_weights`` ends the writing.
    - ``counters`` and ``load_counters`` carry everything else that the next step depends on.

    Attributes:
        module: the part of the model on this rank.
        offloaded: experts in the store of ``offload``; None if the run does not offload.
    """

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        config: RunConfig,
        device: torch.device,
        offloaded: OffloadedExperts | None = None,
    ) -> None:
        self._deepspeed = deepspeed
        self._device = device
        self._zero_stage = config.deepspeed.zero_stage
        self._max_norm = config.deepspeed.gradient_clipping
        self._expert_group = expert_group("expert_parallel", config.m6.training.ep_size)
        self._learning_rate = 0.0
        self.module: M6ForConditionalGeneration = deepspeed.module
        self.offloaded = offloaded
        if offloaded is not None and self._zero_stage > 0:
            count_in_norm(deepspeed.optimizer, lambda: offloaded.squares)

    # A training step

    def begin_step(self, learning_rate: float) -> None:
        """Sets the learning rate of the step that begins."""
        self._learning_rate = learning_rate
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.offloaded is not None:
            self.offloaded.begin(learning_rate)

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: LossFunction, seeds: Sequence[int]) -> None:
        """Adds up the gradients of this rank's micro-batches of a step.

        Args:
            micro_batches: on any device; ``loss`` gets them on the engine's.
            loss: see ``LossFunction``.
            seeds: one for the random numbers of each micro-batch.
        """
        self._deepspeed.train()
        last = len(micro_batches) - 1
        for index, (batch, seed) in enumerate(zip(micro_batches, seeds, strict=True)):
            seed_everything(seed)
            on_device = batch.to(self._device)
            self.backward(loss(on_device, self.forward(on_device)))
            if index < last:
                self._deepspeed.step()  # only counts the micro-batch

    def forward(self, batch: MicroBatch) -> M6Output:
        """The model's output for a micro-batch on the engine's device, without logits."""
        output: M6Output = self._deepspeed(**batch.model_inputs(), labels=batch.labels, return_logits=False)
        return output

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of ``loss``, which is already divided by the size of the global batch."""
        self._deepspeed.backward(loss, scale_wrt_gas=False)

    def update(self) -> Update:
        """Clips the gradients by their global norm and applies them, or drops them if they are not finite."""
        squares = 0.0 if self.offloaded is None else self.offloaded.measure()
        loss_scale = 1.0
        if self._zero_stage == 0:
            norm = clip_gradients(self.module, self._max_norm, self._expert_group, squares)
            skipped = not math.isfinite(norm)
            if skipped:
                self.module.zero_grad(set_to_none=True)  # DeepSpeed's step then has nothing to apply
            self._deepspeed.step()
        else:
            zero = self._deepspeed.optimizer
            loss_scale = float(zero.loss_scale)
            self._deepspeed.step()
            skipped = bool(zero.overflow)
            reported = self._deepspeed.get_global_grad_norm()
            norm = float("inf") if skipped or reported is None else float(reported)
        if self.offloaded is not None:
            self.offloaded.update(self._learning_rate, norm, loss_scale)
        return Update(norm, skipped)

    def measuring(self) -> AbstractContextManager[Any]:
        """Around a whole step: measures the memory by which the placement of offloaded experts is planned."""
        return nullcontext() if self.offloaded is None else self.offloaded.measuring(self._held)

    def replan(self, root: Path, step: int) -> str | None:
        """After step number ``step``: adapts the placement of offloaded experts to what was measured.

        Args:
            root: the run's folder, for the record of the memory.
            step: the number of the step that ended.

        Returns:
            the new memory map for people, if there is one.
        """
        return None if self.offloaded is None else self.offloaded.replan(root, step)

    # Between steps

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While the model computes outside of a training step: without dropout, and the plan ignores experts' uses."""
        was_training = self.module.training
        self._deepspeed.eval()
        with nullcontext() if self.offloaded is None else self.offloaded.runtime.evaluating():
            yield
        self._deepspeed.train(was_training)

    def memory_map(self) -> str | None:
        """Where offloaded experts lie, for people; None if the run does not offload."""
        return None if self.offloaded is None else self.offloaded.memory_map()

    def state_bytes(self) -> dict[str, int]:
        """Bytes on this rank between two steps: ``weights`` (with buffers), ``optimizer_state`` (with fp32 masters),
        and ``experts``: weights and optimizer state of those that are offloaded, wherever they lie."""
        held = {part: storage_bytes(*tensors) for part, tensors in self.state_tensors().items()}
        if self.offloaded is not None:
            held["experts"] = self.offloaded.state_bytes
        return held

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """The tensors of ``weights`` and ``optimizer_state``; some may share their memory."""
        optimizer_state = [*state.moments(self._deepspeed), *state.fp32_masters(self._deepspeed)]
        return {"weights": state.weights(self._deepspeed), "optimizer_state": optimizer_state}

    def gradient_bytes(self) -> int:
        """Bytes of the gradients on this rank, between the last micro-batch of a step and its update."""
        return storage_bytes(*state.gradients(self._deepspeed))

    # Checkpoints

    @property
    def tensor_names(self) -> set[str]:
        """The names of everything that a checkpoint of this model may hold."""
        names = {name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        return names if self.offloaded is None else names | self.offloaded.names

    def fragments(self) -> Iterator[Fragment]:
        """The training state of this rank: weights in fp32 and the optimizer's moments, also before the first step."""
        state.create_moments(self._deepspeed)
        yield from fragments(self._deepspeed)
        if self.offloaded is not None:
            yield from self.offloaded.fragments()

    def publish_weights(self) -> None:
        """Makes the forward pass use the weights that were written into the fragments."""
        state.publish_weights(self._deepspeed)

    @property
    def optimizer_step(self) -> int:
        """How many updates the optimizer has applied; skipped steps do not count."""
        return state.optimizer_step(self._deepspeed)

    def counters(self) -> dict[str, Any]:
        """What a step depends on besides the fragments, as JSON."""
        found: dict[str, Any] = {"optimizer_step": self.optimizer_step}
        scaler = state.loss_scaler_state(self._deepspeed)
        return {**found, "loss_scaler": scaler} if scaler else found

    def load_counters(self, counters: dict[str, Any], step: int) -> None:
        """Goes on as the engine would that returned ``counters`` after ``step`` steps."""
        state.set_optimizer_step(self._deepspeed, counters["optimizer_step"])
        if self.offloaded is not None:
            self.offloaded.runtime.num_updates = counters["optimizer_step"]
        for key, value in counters.get("loss_scaler", {}).items():
            setattr(self._deepspeed.optimizer.loss_scaler, key, value)
        self._deepspeed.global_steps = step

    def release(self) -> None:
        """Frees all memory of the engine, which cannot be used afterwards."""
        if self.offloaded is not None:
            self.offloaded.close()
        state.release(self._deepspeed)

    def _held(self) -> list[Tensor]:
        """All tensors that exist before a step. The optimizer's state is allocated now, so that the step does not."""
        state.create_moments(self._deepspeed)
        held = [tensor for tensors in self.state_tensors().values() for tensor in tensors]
        return [*held, *(p.grad for p in self.module.parameters() if p.grad is not None)]
