"""Offloaded experts: an ``OffloadRuntime`` in training steps and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m6.architecture.sharing import Sharing
from m6.checkpoints.format import WEIGHT, Fragment
from m6.config.run import RunConfig
from m6.errors import UserError
from m6.model.initialization import initialize_part
from m6.model.modeling import M6ForConditionalGeneration
from m6.training.deepspeed_private import expert_group
from m6.training.offloading.modules import experts_of, offload_activations, stream
from m6.training.offloading.report import memory_map, write_memory_record
from m6.training.offloading.setup import ActivationTraffic, describe_shortage, prepare
from m6.training.replicas import Replicated
from offload import (
    DelayedUpdate,
    OffloadRuntime,
    SimulatedDevice,
    StorageMeter,
    Trace,
    solve,
    staging_bytes,
)

_MEASURED_STEPS = 2
"""Measured steps of an attempt: the plan is made from the first step and checked in the second step."""


class OffloadedExperts:
    """This rank's offloaded experts with their gradients and optimizer state.

    DeepSpeed does not see these experts. Each gradient is summed over the ranks with the same experts as soon as it is
    computed. The loss is multiplied by the number of ranks with different micro-batches. The update divides by this
    number in fp32, so small gradients do not become zero.

    Args:
        model: on the meta device, with this rank's share of the experts. The constructor replaces the experts by
            modules with weights from the offload runtime.
        torch_device: the device of the rest of the model.
        sharing: the shared layers of the Pseudo model; None: the Real model.
        replicas: the ranks with the same layers; None: all.

    Attributes:
        runtime: the store of the experts; it moves them between host and device.
        squares: sum of squares of the experts' gradients in this step, see ``measure``.

    Raises:
        UserError: a memory budget is too small.
    """

    def __init__(
        self,
        model: M6ForConditionalGeneration,
        config: RunConfig,
        torch_device: torch.device,
        sharing: Sharing | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        settings = config.expert_store
        assert settings is not None
        self.settings = settings
        self._max_norm = config.deepspeed.gradient_clipping
        self.squares = 0.0
        self._ep_size = config.m6.training.ep_size
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        # With "deterministic" the engine sums the gradients. Neither this engine nor pipelines multiply the loss.
        by_engine = config.m6.training.deterministic is not None
        self._averaged_over = 1 if by_engine or config.pipeline is not None else config.data_size(world_size)
        self._same_experts = expert_group("expert_data_parallel", self._ep_size) or replicas
        copies = 1 if world_size == 1 else dist.get_world_size(self._same_experts)
        uses = experts_of(model)
        self._setup = setup = prepare(uses, config, torch_device, sharing)
        self._config = config
        try:
            self.runtime = OffloadRuntime(
                [use.stack(name) for name, use in uses.items()],
                setup.device,
                setup.optimizer,
                dtype=setup.dtype,
                chunk_bytes=setup.chunk_bytes,
                gradient_dtype=setup.gradient_dtype,
                num_threads=settings.num_threads,
                host_budget_bytes=setup.host_budget_bytes,
                update_in_backward=settings.update == "backward",
                next_weights=setup.next_weights,
                plan=setup.plan,
                reduce=None if by_engine or copies == 1 else self._sum,
                uses_at_once=config.m6.training.overlap_micro_batches,
            )
        except ValueError as error:
            raise UserError(f"m6.offload: {describe_shortage(error, config, setup.dtype)}") from None
        self._num_steps = 0
        self._meter: StorageMeter | None = None
        self._stacks: dict[str, tuple[int, int]] = {}
        mean = config.m6.pseudo_to_real is not None and config.m6.pseudo_to_real.gradient == "mean"
        for name, use in uses.items():
            experts = use.experts
            attributes = experts.parameter_attributes
            self._stacks[name] = (int(attributes["first_expert"]), int(attributes["num_global_experts"]))
            experts.to_empty(device="cpu")  # one layer at a time: all experts together may exceed the memory
            initialize_part(experts, name, config.model, config.m6.training.seed)
            self.runtime.write(WEIGHT, name, {key: value.detach() for key, value in experts.named_parameters()})
            experts.to("meta")
            stream(use, self.runtime, name, len(use.layers) if mean else 1)
        offload_activations(model, self.runtime.activations, setup.activations)

    # A step

    def measuring(self, resident_tensors: Callable[[], Iterable[Tensor]]) -> AbstractContextManager[Any]:
        """A context around a step. It measures non-model memory on the simulated device, only in the first steps.

        Non-model memory is everything outside of the offload runtime: other weights, gradients and activations.

        Args:
            resident_tensors: returns all tensors of the engine before the step.
        """
        device = self.runtime.device
        if not isinstance(device, SimulatedDevice) or self._num_steps >= _MEASURED_STEPS:
            return nullcontext()
        if self._meter is None:
            self._meter = device.meter = StorageMeter([*resident_tensors()], device.storages)
        return self._meter

    def begin(self, learning_rate: float) -> None:
        """Begins a step; call it before the first forward pass."""
        if self.runtime.update_in_backward:
            self.runtime.begin_step(learning_rate * self._setup.learning_rate_scale, 1.0 / self._averaged_over)
        self.runtime.begin_delayed_update()

    def measure(self) -> float:
        """Returns the sum of squares of the experts' gradients, including the loss scale; equal on all ranks."""
        squares = torch.tensor(self.runtime.sum_of_squares() / self._averaged_over**2, dtype=torch.float64)
        if self._ep_size > 1:
            squares = squares.to(self.runtime.device.torch_device)
            dist.all_reduce(squares, group=expert_group("expert_parallel", self._ep_size))
        self.squares = float(squares)
        return self.squares

    def update(self, learning_rate: float, norm: float, loss_scale: float = 1.0) -> None:
        """Updates the experts, or skips the update if the norm of all gradients is not finite.

        Args:
            norm: norm of all gradients of the model, without the loss scale.

        Raises:
            UserError: the norm is not finite, but experts have already been updated in the backward pass.
        """
        if self.runtime.update_in_backward:
            self.runtime.skip()  # ends the step: its updates are already done
            if not math.isfinite(norm):
                raise UserError(
                    'm6.offload: gradients are not finite, and with "update": "backward" they have already updated '
                    "experts: resume from the last checkpoint, which was saved before this step, with "
                    '"update": "next_forward"'
                )
        elif math.isfinite(norm):
            # The same clipping factor as DeepSpeed's for the other parameters.
            clip = max(1.0, (norm + 1e-6) / self._max_norm) if self._max_norm > 0 else 1.0
            factor = 1.0 / (clip * loss_scale * self._averaged_over)
            self.runtime.step(learning_rate * self._setup.learning_rate_scale, factor)
        else:
            self.runtime.skip()

    def delayed_update(self) -> dict[str, float]:
        """Returns the delayed update's entries for a checkpoint's state; empty if there is no delayed update."""
        waiting = self.runtime.delayed_update
        if waiting is None:
            return {}
        return {"experts_learning_rate": waiting.learning_rate, "experts_coefficient": waiting.coefficient}

    def expect(self, waiting: dict[str, float]) -> None:
        """Allocates fragments for the delayed gradients of a checkpoint with this ``delayed_update``.

        The gradients are raw: sums over ranks, with the loss scale. The coefficient undoes these factors.
        """
        self.runtime.delayed_update = DelayedUpdate(waiting["experts_learning_rate"], waiting["experts_coefficient"])

    # Plans

    def memory_map(self) -> str:
        """Returns the placement of the experts before the first step, planned from the dry trace, as text."""
        if self._setup.plan is None:
            return f"offloaded experts: no plan fits the dry trace ({self._setup.shortage}); the first step decides"
        return memory_map(self.runtime, self._setup.plan, "a dry trace", self._setup.traffic)

    def replan(self, root: Path, step: int) -> str | None:
        """Makes a new plan after the first step, and records memory after the second step. Call it after each step.

        Args:
            root: the run's folder.
            step: the number of the finished step.

        Returns:
            the new memory map as text; None if there is no new plan.

        Raises:
            UserError: a memory budget is too small.
        """
        self._num_steps += 1
        runtime = self.runtime
        if self._num_steps == 1:
            host = self._setup.host_budget_bytes
            # Later batches may need more memory than the first, but not more than the dry trace.
            trace = self._of_all_replicas(runtime.trace.with_nonmodel_bytes_of(self._setup.trace))
            try:
                plan = solve(
                    trace,
                    runtime.sizes,
                    runtime.device.budget_bytes,
                    self.settings.prefetch_depth,
                    runtime.device.rates,
                    None if host is None else host - staging_bytes(runtime.sizes),
                    self._setup.constraints,
                )
            except ValueError as error:
                shortage = describe_shortage(error, self._config, self._setup.dtype)
                raise UserError(f"m6.offload: {shortage}") from None
            runtime.adopt(plan)
            activations = runtime.activations
            traffic = ActivationTraffic(
                activations.host_bytes, activations.downloaded_bytes, activations.uploaded_bytes
            )
            return memory_map(runtime, plan, "the first step", traffic)
        if self._num_steps == _MEASURED_STEPS:
            assert runtime.plan is not None  # the first step has made it
            runtime.recorder.timed = False
            write_memory_record(root, dist.get_rank() if dist.is_initialized() else 0, runtime, runtime.plan, step)
            if isinstance(runtime.device, SimulatedDevice):
                # The measurements end here. From now on the simulated device assumes the measured non-model memory,
                # and raises an error if the budget is exceeded.
                trace = runtime.plan.trace
                runtime.device.meter, self._meter = None, None
                runtime.device.nonmodel_trace = [
                    *(moment.nonmodel_bytes for moment in trace.moments),
                    trace.outside_bytes,
                ]
                runtime.device.assumed_nonmodel_bytes = trace.outside_bytes
        return None

    # State

    @property
    def names(self) -> set[str]:
        """The names of the experts' parameters in the model."""
        return {f"{stack}.{name}" for stack in self._stacks for name in self.runtime.matrices_of(stack)}

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's experts on device and host: weights, masters, optimizer state and gradient buffers."""
        return sum(size.owned for size in self.runtime.sizes)

    def fragments(self, to_fill: bool = False) -> Iterator[Fragment]:
        """Yields copies of the experts' weights and moments in fp32, one layer at a time.

        Args:
            to_fill: write the copies back to the runtime, when the caller asks for the next layer.
        """
        # Ranks with the same experts hold the same values, so each rank saves an equal share.
        replica = (dist.get_rank(self._same_experts), dist.get_world_size(self._same_experts))
        for stack, (first_expert, num_experts) in self._stacks.items():
            for kind in self.runtime.kinds:
                values = self.runtime.read(kind, stack)
                for name, value in values.items():
                    if value.numel() == 0:
                        continue  # another parameter has this state
                    offset, shape = first_expert * value[0].numel(), (num_experts, *value.shape[1:])
                    yield Fragment(f"{stack}.{name}", kind, offset, value.view(-1), shape, replica)
                if to_fill:
                    self.runtime.write(kind, stack, values)

    def replicated(self) -> Iterator[Replicated]:
        """Yields copies of the experts' weights in fp32, if other ranks hold the same experts."""
        if dist.get_world_size(self._same_experts) > 1:
            for stack in self._stacks:
                for name, value in self.runtime.read(WEIGHT, stack).items():
                    yield Replicated(f"{stack}.{name}", value, self._same_experts)

    def nonfinite_weights(self) -> list[str]:
        """Returns the names of this rank's weights with values that are not finite. It reads one layer at a time."""
        return [
            f"{stack}.{name}"
            for stack in self._stacks
            for name, value in self.runtime.read(WEIGHT, stack).items()
            if not value.isfinite().all()
        ]

    def _of_all_replicas(self, trace: Trace) -> Trace:
        """Returns the trace with the largest non-model bytes of all ranks with the same experts.

        The device of each of these ranks must own the same experts.
        """
        if not dist.is_initialized():
            return trace
        device = self.runtime.device.torch_device
        most = torch.tensor([*(each.nonmodel_bytes for each in trace.moments), trace.outside_bytes], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._same_experts)
        *bytes_of_moments, outside = most.tolist()
        moments = [
            replace(moment, nonmodel_bytes=value) for moment, value in zip(trace.moments, bytes_of_moments, strict=True)
        ]
        return Trace(tuple(moments), outside)

    def _sum(self, gradient: Tensor) -> None:
        """Sums a gradient in place over the ranks with the same experts."""
        dist.all_reduce(gradient, group=self._same_experts)

    def close(self) -> None:
        """Stops the host threads and frees all memory."""
        self.runtime.close()
