"""The sums of a training step: accumulated on the device, and reduced over the ranks in one collective."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from m6.data.objectives import OBJECTIVES
from m6.runs.signals import Requests

_COLUMNS = 2 * len(OBJECTIVES)


@dataclass(frozen=True)
class StepResult:
    """The sums of one step over all ranks and micro-batches.

    Attributes:
        loss_sums: cross entropy by objective, in nats.
        targets: number of target tokens by objective.
        aux_loss_sum: the routers' weighted auxiliary losses, of all tokens.
        loss_sum: cross entropy of all targets, in nats.
        requests: stop or save if any rank requests it.
    """

    loss_sums: dict[str, float]
    targets: dict[str, float]
    aux_loss_sum: float
    loss_sum: float
    requests: Requests


def sum_of_all(values: Tensor, exact: bool, group: dist.ProcessGroup | None = None) -> list[float]:
    """Sums the rows of all ranks in one collective. This call synchronises the device.

    Args:
        values: [micro-batches, C] fp64, of equal shape on all ranks.
        exact: round only the final sum, so that it does not depend on the number of ranks. An all-gather then gives
            every rank all rows.
        group: the ranks; None: all of the run.
    """
    return sum_of_all_later(values, exact, group)()


def sum_of_all_later(values: Tensor, exact: bool, group: dist.ProcessGroup | None = None) -> Callable[[], list[float]]:
    """Begins ``sum_of_all``, and returns a function that waits for its result."""
    ranks = dist.get_world_size(group)
    rows = values.new_empty(ranks * len(values), values.shape[1]) if exact else values.sum(0)
    if exact:
        work = dist.all_gather(list(rows.chunk(ranks)), values, group=group, async_op=True)
    else:
        work = dist.all_reduce(rows, group=group, async_op=True)

    def wait() -> list[float]:
        assert work is not None
        work.wait()
        if not exact:
            total: list[float] = rows.tolist()
            return total
        # fsum raises an error for infinities of both signs. The plain sum correctly gives NaN.
        return [math.fsum(column) if all(map(math.isfinite, column)) else sum(column) for column in rows.T.tolist()]

    return wait


def padded(values: Tensor) -> Tensor:
    """Pads the rows of this rank with zeros to the largest number of rows of any rank."""
    most = torch.tensor(len(values), device=values.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return torch.nn.functional.pad(values, (0, 0, 0, int(most) - len(values)))


class StepSums:
    """Sums of one optimizer step over its micro-batches. ``reduce`` sums over ranks in one collective.

    Args:
        exact: see ``sum_of_all``.
        is_uneven: whether ranks have unequal numbers of parts of micro-batches.
        counts: whether this rank's losses count; False if another rank computes the same losses.
    """

    def __init__(self, device: torch.device, exact: bool = False, counts: bool = True, is_uneven: bool = False) -> None:
        # For each micro-batch:
        # [sum of losses per objective | targets per objective | aux loss | loss | stop | save]
        self._device, self._exact, self._counts, self._is_uneven = device, exact, counts, is_uneven
        self._rows: list[Tensor] = []

    def add(self, losses: Tensor, loss: Tensor, objective_ids: Tensor, aux_loss: Tensor) -> None:
        """Adds a micro-batch, or a part of it.

        Args:
            losses: [N], cross entropy of each target, in nats.
            loss: scalar, the sum of ``losses``.
            objective_ids: [N], the objective of each target.
            aux_loss: scalar, the routers' weighted auxiliary losses, summed over the tokens.
        """
        # index_add_ needs no count of the targets on the host, so the device is not synchronised.
        losses = losses.detach().double()
        row = torch.zeros(_COLUMNS + 4, dtype=torch.float64, device=self._device)
        row.index_add_(0, objective_ids, losses)
        row.index_add_(0, objective_ids + len(OBJECTIVES), torch.ones_like(losses))
        row[_COLUMNS] += aux_loss.detach()
        row[_COLUMNS + 1] += loss.detach()
        self._rows.append(row)

    def nonfinite(self) -> tuple[str, ...]:
        """Returns the objectives with non-finite losses on this rank; "the routers" stands for the auxiliary loss."""
        names = [*OBJECTIVES, "the routers"]
        columns = [*range(len(OBJECTIVES)), _COLUMNS]
        finite = torch.stack(self._rows).isfinite().all(0).tolist()
        return tuple(name for name, column in zip(names, columns, strict=True) if not finite[column])

    def reduce(self, requests: Requests) -> StepResult:
        """Sums over all ranks in one collective. This call synchronises the device."""
        return self.reduce_later(requests)()

    def reduce_later(self, requests: Requests) -> Callable[[], StepResult]:
        """Begins the collective, and returns a function that waits for its result."""
        rows = self._with(requests)
        wait = sum_of_all_later(padded(rows) if self._exact and self._is_uneven else rows, self._exact)
        return lambda: _result(wait())

    def _with(self, requests: Requests) -> Tensor:
        """Returns all rows, with the requests of this rank in the last row."""
        self._rows[-1][_COLUMNS + 2] = float(requests.stop)
        self._rows[-1][_COLUMNS + 3] = float(requests.save)
        rows = torch.stack(self._rows)
        if not self._counts:
            rows[:, : _COLUMNS + 2] = 0.0
        return rows


def _result(values: list[float]) -> StepResult:
    objectives = len(OBJECTIVES)
    return StepResult(
        loss_sums=dict(zip(OBJECTIVES, values[:objectives], strict=True)),
        targets=dict(zip(OBJECTIVES, values[objectives:_COLUMNS], strict=True)),
        aux_loss_sum=values[_COLUMNS],
        loss_sum=values[_COLUMNS + 1],
        requests=Requests(stop=values[_COLUMNS + 2] > 0, save=values[_COLUMNS + 3] > 0),
    )


@dataclass(frozen=True)
class StepOutcome:
    """The result of one step; equal on all ranks, except ``own_nonfinite_losses``.

    Attributes:
        step: number of finished steps, this one included.
        result: sums over all ranks, and the requests of all ranks.
        loss: mean cross entropy over the targets of the global batch, in nats.
        aux_loss: mean over tokens of the routers' weighted auxiliary losses.
        grad_norm: norm of all gradients before clipping.
        skipped: whether a gradient was not finite. Then no weight changed.
        loss_scale: of the gradients; 1 except in fp16.
        nonfinite_routers: names of the layers with non-finite router logits; empty if the step was not skipped.
        nonfinite_stages: see ``Update``.
        tokens, samples, pictures: of the global batch, without padding.
        bad_rows: number of unusable rows of the data.
        token_pairs: sum of the squared lengths of the samples.
        own_nonfinite_losses: see ``StepSums.nonfinite``, of this rank; empty if the step was not skipped.
    """

    step: int
    result: StepResult
    loss: float
    aux_loss: float
    learning_rate: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    nonfinite_routers: list[str]
    nonfinite_stages: tuple[str, ...]
    tokens: int
    samples: int
    bad_rows: int
    pictures: int
    token_pairs: int
    own_nonfinite_losses: tuple[str, ...] = ()
