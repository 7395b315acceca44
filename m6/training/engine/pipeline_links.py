"""Messages between the ranks of a pipeline for which the sender does not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from m6.training.mesh import Mesh


class PipelineLinks:
    """Groups of ranks for messages that may overtake those of others: each has one direction or one purpose.

    NCCL runs the messages of a group one after the other, so that a message that waits for its receiver would hold up
    those of the other direction.

    Args:
        mesh: of this rank.
        ends: see ``Mesh.of_ends``.

    Attributes:
        forward: to the next rank of the pipeline, for hidden states.
        backward: to the previous rank of the pipeline, for their gradients.
        sums: all ranks of the pipeline, for what they add up.
        table: from the first rank of the pipeline to the last one; None on the others.
        gradient_of_table: from the last rank of the pipeline to the first one; None on the others.
    """

    def __init__(self, mesh: Mesh, ends: dist.ProcessGroup | None) -> None:
        self.forward, self.backward, self.sums = map(mesh.of_pipelines, ("forward", "backward", "sums"))
        self.table, self.gradient_of_table = ends, mesh.of_ends("gradient of the table")
        self._device = mesh.device
        # No message is older than two rounds of the pipeline when its receiver has it.
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()
        self._most = 2 * mesh.dims.pp

    def send(self, tensor: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
        """Sends a tensor, which must not change before it is received, to a global rank of a group."""
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
        """Waits until everything that this rank has sent is received."""
        while self._sent:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        work, _ = self._sent.popleft()
        if work is not None:
            work.wait()
