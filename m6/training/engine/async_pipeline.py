"""The runner of ``m6.parallel.pipeline`` with ``m6.gradient_delay``: 1F1B without a flush between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.training.engine.pipeline import PipelineRunner
from m6.training.engine.runner import Step
from m6.training.engine.updater import StepGradients, Update
from m6.training.mesh import Mesh

Weights = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class InFlightMicroBatch:
    """An in-flight micro-batch: between its forward and its backward pass on this rank.

    Attributes:
        step: the number of its step, counted from this runner's first step.
        is_last: whether it is the last micro-batch of its step.
        passes: the number of passes of its step in each pipeline.
        hidden_states: the input of the stage, [B, S, D]; None in the first stage.
        output: of the stage: hidden states, or the loss [1] of the last stage.
        learning_rate: of its step.
        weights: the weights of its forward pass, if they differ from the parameters; otherwise empty.
    """

    step: int
    is_last: bool
    passes: tuple[int, ...]
    hidden_states: Tensor | None
    output: Tensor
    learning_rate: float
    weights: Weights


class AsyncPipelineRunner(PipelineRunner):
    """Begins the forward passes of a step while backward passes of the previous step are still in flight.

    This is PipeDream-2BW (arXiv 2006.09503, section 3): gradients are used one step late, and two versions of the
    weights are enough. Step t computes with V(t) = V(t-1) - lr u(g(t-2)). On rank s of P, the last P - s - 1 backward
    passes of step t-1 run between the first forward passes of step t, with the weights V(t-1). Then g(t-1) is complete:
    it is reduced, clipped by the norm of all stages, and stored. No rank waits for the norm before it has begun all
    forward passes of step t.

    After ``accumulate`` some micro-batches are still in flight. ``advance`` updates with a complete step, if there is
    one. ``update`` first ends all passes, like the other runners.
    """

    def _build_schedule(self) -> None:
        """Makes the state of our own schedule. PyTorch's schedules would end all passes of a step."""
        self._links = PipelineLinks(self._mesh, self._ends)
        [(self._number, self._stage)] = self._stages.items()
        self._ahead = self._mesh.dims.pp - 1 - self._number
        self._in_flight: deque[InFlightMicroBatch] = deque()
        self._begun = 0  # steps of this runner
        self._ended: tuple[int, StepGradients] | None = None  # a complete step before its update
        self._updates: deque[Update] = deque()  # not yet returned by ``advance`` or ``update``
        self._has_next_version = True  # whether the parameters already hold the weights of the next step

    # A training step

    def accumulate(self, step: Step) -> None:
        """See ``Runner.accumulate``. The last backward passes do not run yet."""
        self._deepspeed.train()
        self._take_next_version()
        self._send_table()
        self._step, self._begun = self._prepared(step), self._begun + 1
        weights: Weights = {}
        for number in range(len(step.batches)):
            if number == len(step.batches) - self._ahead:
                # The backward passes of these micro-batches come after the update for the next step, so keep a copy.
                weights = {parameter: parameter.data.clone() for parameter in self._trained}
            self._pass_forward(number, weights)
            if len(self._in_flight) > self._ahead:
                self._pass_backward()
        self._step = None

    def advance(self) -> Update | None:
        """Updates with the gradients of the step before the newest step, see ``Engine.advance``."""
        if self._ended is not None and self._ended[0] < self._begun:
            self._apply_ended()
        return self._updates.popleft() if self._updates else None

    def update(self, learning_rate: float) -> Update:
        """Ends all passes and updates with the gradients of the newest step, see ``Engine.update``."""
        while self._in_flight:
            self._pass_backward()
        self._apply_ended()
        self._links.wait()
        self._has_next_version = True
        newest = self._updates.pop()
        self._updates.clear()
        return newest

    def _take_next_version(self) -> None:
        """Updates the parameters to the weights of the new step."""
        assert self._updater.delayed is not None
        if not self._has_next_version:
            with self._set_aside():
                self._updater.delayed.use()
        self._has_next_version = False

    # Passes

    def _pass_forward(self, number: int, weights: Weights) -> None:
        step, hidden_states = self._step, None
        assert step is not None
        if self._number > 0:
            shape = (*self._shape_of(step.batches[number]), self._config.model.hidden_size)
            hidden_states = self._receive(shape, self._number - 1, self._links.forward).requires_grad_()
        with _in_parameters(weights):
            output = self._pass(self._stage, hidden_states, number)
        if not self._stage.is_last:
            self._send(output.detach(), self._number + 1, self._links.forward)
        place = (self._begun, number + 1 == len(step.batches), step.passes)
        self._in_flight.append(InFlightMicroBatch(*place, hidden_states, output, step.learning_rate, weights))

    def _pass_backward(self) -> None:
        """Runs the backward pass of the oldest in-flight micro-batch."""
        oldest, gradient = self._in_flight.popleft(), None
        if not self._stage.is_last:
            gradient = self._receive(oldest.output.shape, self._number + 1, self._links.backward)
        with _in_parameters(oldest.weights):
            torch.autograd.backward(oldest.output, gradient)
        if oldest.hidden_states is not None:
            assert oldest.hidden_states.grad is not None
            self._send(oldest.hidden_states.grad, self._number - 1, self._links.backward)
        self._reducer.end_pass(oldest.passes)
        if oldest.is_last:
            self._end_step(oldest)

    def _end_step(self, last: InFlightMicroBatch) -> None:
        """Takes the gradients of a step after its last backward pass."""
        self._end_passes()
        if self._ended is not None:
            self._apply_ended()
        self._ended = last.step, self._stage_updater.collect(self._sums(), last.learning_rate, self._links.sums)

    def _apply_ended(self) -> None:
        """Updates with the gradients of the complete step."""
        assert self._ended is not None
        (_, ended), self._ended = self._ended, None
        with self._set_aside():
            self._updates.append(self._stage_updater.apply(ended))

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """A context for an update while passes are in flight.

        The passes have their own copies of the weights. Their partial gradients are removed and restored afterwards.
        """
        gradients = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        # Without this PyTorch refuses the backward passes, because saved parameters were changed in place.
        try:
            with torch.autograd._unsafe_preserve_version_counter(tuple(self._trained)):
                yield
        finally:
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                parameter.grad = gradient

    # Messages

    def _send_table(self) -> None:
        """Sends the token embedding to the last rank. The first rank changes it only after the last rank's answer."""
        if self._links.table is None:
            return
        assert self._table is not None
        if self._copy is None:
            self._links.send(self._table.data, self._mesh.stage_ends[1], self._links.table)
        else:
            dist.recv(self._table.data, self._mesh.stage_ends[0], group=self._links.table)

    def _joined(self, gradient: Tensor | None) -> Tensor | None:
        assert self._table is not None
        if gradient is None:
            gradient = torch.zeros_like(self._table)
        group = self._links.gradient_of_table
        if self._copy is not None:
            self._links.send(gradient, self._mesh.stage_ends[0], group)
            return None
        return gradient + self._links.receive(gradient.shape, gradient.dtype, self._mesh.stage_ends[1], group)

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup | None) -> None:
        self._links.send(tensor, self._rank_of(stage), group)

    def _receive(self, shape: Sequence[int], stage: int, group: dist.ProcessGroup | None) -> Tensor:
        return self._links.receive(shape, self._dtype, self._rank_of(stage), group)


@contextmanager
def _in_parameters(weights: Weights) -> Iterator[None]:
    """A context in which the parameters have these weights.

    Both passes of a micro-batch need it. For the backward pass PyTorch saves some parameters themselves, and views of
    others; the views keep the weights of the forward pass. PyTorch would not notice a mixture of both.
    """
    own = {parameter: parameter.data for parameter in weights}
    for parameter, data in weights.items():
        parameter.data = data
    try:
        yield
    finally:
        for parameter, data in own.items():
            parameter.data = data


class PipelineLinks:
    """Separate groups of ranks for each direction and purpose of messages.

    NCCL runs the messages of a group one after the other. In a common group, a message without a ready receiver would
    block the messages of the other direction.

    Args:
        mesh: of this rank.
        ends: see ``Mesh.of_ends``.

    Attributes:
        forward: to the next rank of the pipeline, for hidden states.
        backward: to the previous rank of the pipeline, for their gradients.
        sums: all ranks of the pipeline, for sums.
        table: from the first rank of the pipeline to the last rank; None on the other ranks.
        gradient_of_table: from the last rank of the pipeline to the first rank; None on the other ranks.
    """

    def __init__(self, mesh: Mesh, ends: dist.ProcessGroup | None) -> None:
        self.forward, self.backward, self.sums = map(mesh.of_pipelines, ("forward", "backward", "sums"))
        self.table, self.gradient_of_table = ends, mesh.of_ends("gradient of the table")
        self._device = mesh.device
        # A message is received within two rounds of the pipeline, so ``send`` rarely waits for an older one.
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._most = 2 * mesh.dims.pp

    def send(self, tensor: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
        """Sends a tensor to a global rank of a group. The tensor must not change before it is received."""
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, rank, group=group), tensor))
        while len(self._sent) > self._most:
            self._wait_for_oldest()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int, group: dist.ProcessGroup | None) -> Tensor:
        """Waits for the next tensor from a global rank of a group."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, rank, group=group)
        return tensor

    def wait(self) -> None:
        """Waits until all messages from this rank are received."""
        while self._sent:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        work, _ = self._sent.popleft()
        if work is not None:
            work.wait()
