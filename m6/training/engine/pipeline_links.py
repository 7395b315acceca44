"""Asynchronous messages between the ranks of a pipeline: the sender does not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from m6.training.mesh import Mesh


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
