"""Finds a plan with the fewest moved bytes under the device's budget, by a linear programme and rounding.

For each chunk c, y_c = 1 if the device owns it with its optimizer state, so nothing of it moves. For each interval i
between two uses of a chunk in a step, x_i = 1 if the chunk stays on the device. This saves one upload. At each moment
t, and outside of the uses,

    sum over c: owned_bytes_c y_c  +  sum over i spanning t: weight_bytes_i x_i  <=  budget - nonmodel_bytes_t - window

and y_c + x_i <= 1. The programme maximises the saved seconds of copies. Few values of its solution are fractional.
They are rounded down, or up for one or two more chunks, and intervals then get the remaining bytes. The best of these
plans is returned.

Two simpler rules choose chunks by the free bytes at each moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from offload.devices.device import Rates
from offload.memory.layout import ChunkBytes, in_mib, window_bytes
from offload.plan.placement import PlacementConstraints, PlacementPlan
from offload.plan.trace import Interval, Trace

if TYPE_CHECKING:
    from scipy.sparse import csr_array


def retain_greedily(
    intervals: Sequence[Interval], weights: Sequence[int], order: Sequence[int], free_bytes: Sequence[int]
) -> set[int]:
    """Keeps each interval if it fits, in the given order.

    Args:
        weights: the bytes of each interval; 0 if they are already subtracted from ``free_bytes``.
        order: the indices of the intervals to try.
        free_bytes: the free bytes at each moment.

    Returns:
        The indices of the kept intervals.
    """
    left, kept = list(free_bytes), set()
    for index in order:
        span = range(intervals[index].begin + 1, intervals[index].end)
        if not weights[index] or all(left[moment] >= weights[index] for moment in span):
            kept.add(index)
            for moment in span:
                left[moment] -= weights[index]
    return kept


def retain_by_belady(
    intervals: Sequence[Interval], weights: Sequence[int], candidates: Sequence[int], free_bytes: Sequence[int]
) -> set[int]:
    """Keeps every interval until there is no room, and then drops the interval with the latest next use (Belady 1966).

    Arguments and result are as for ``retain_greedily``; ``candidates`` may have any order.
    """
    starts: dict[int, list[int]] = {}
    for index in candidates:
        starts.setdefault(intervals[index].begin, []).append(index)
    held: set[int] = set()
    kept: set[int] = set()
    used = 0
    for moment in range(len(free_bytes)):
        for index in [index for index in held if intervals[index].end <= moment]:
            held.remove(index)
            kept.add(index)
            used -= weights[index]
        for index in starts.get(moment - 1, []):
            if intervals[index].end == moment:
                kept.add(index)
            else:
                held.add(index)
                used += weights[index]
        while used > free_bytes[moment]:
            worst = max((index for index in held if weights[index]), key=lambda index: (intervals[index].end, index))
            held.remove(worst)
            used -= weights[worst]
    return kept


_NUM_ROUNDINGS = 3  # rounding down, and up by one and by two chunks


def solve(
    trace: Trace,
    sizes: Sequence[ChunkBytes],
    budget_bytes: int,
    prefetch_depth: int = 1,
    rates: Rates | None = None,
    host_budget_bytes: int | None = None,
    constraints: PlacementConstraints | None = None,
) -> PlacementPlan:
    """Returns the plan with the least time for copies.

    Args:
        trace: the step to plan for.
        sizes: the chunks' sizes, by number.
        budget_bytes: the device's budget.
        prefetch_depth: how many uses ahead an upload starts.
        rates: the copies' rates; the update on the host counts as free.
        host_budget_bytes: the limit for all chunks on the host, with ``ChunkBytes.owned`` for each. None: there is no
            limit.
        constraints: decisions to follow.

    Raises:
        ValueError: a budget is too small; the message names the smallest sufficient one.
    """
    problem = _Problem(
        trace, sizes, budget_bytes, prefetch_depth, rates or Rates(), constraints or PlacementConstraints()
    )
    least_owned = 0
    if host_budget_bytes is not None:
        least_owned = max(0, sum(size.owned for size in sizes) - host_budget_bytes)
        if least_owned > problem.ownable_bytes:
            raise ValueError(
                f"the host's budget of {in_mib(host_budget_bytes)} is too small: with as many chunks on the device as "
                f"it can own, the host has to hold {in_mib(sum(size.owned for size in sizes) - problem.ownable_bytes)}"
            )
    owned_share, _, bound = problem.relax(least_owned)
    plans: list[PlacementPlan] = []
    for num_more in range(_NUM_ROUNDINGS):
        owned = problem.round_owned(owned_share, least_owned, num_more)
        if plans and owned == plans[-1].owned:
            break
        _, kept_share, _ = problem.relax(0, owned)
        plans.append(problem.plan(owned, problem.round_kept(owned, kept_share), bound))
    return min(plans, key=problem.seconds)


class _Rows:
    """The rows of a sparse matrix, and the right side of each."""

    def __init__(self, num_columns: int) -> None:
        self.num_columns, self.limits = num_columns, list[float]()
        self._columns, self._values, self._ends = list[int](), list[float](), [0]

    def add(self, entries: dict[int, float], limit: float) -> None:
        self._columns += entries.keys()
        self._values += entries.values()
        self._ends.append(len(self._columns))
        self.limits.append(limit)

    def matrix(self) -> csr_array:
        from scipy.sparse import csr_array

        return csr_array((self._values, self._columns, self._ends), shape=(len(self.limits), self.num_columns))


class _Problem:
    """The coefficients of the linear programme, and the steps of its solution."""

    def __init__(
        self,
        trace: Trace,
        sizes: Sequence[ChunkBytes],
        budget_bytes: int,
        prefetch_depth: int,
        rates: Rates,
        constraints: PlacementConstraints,
    ) -> None:
        self.constraints = constraints
        self.trace, self.sizes, self.rates, self.prefetch_depth = trace, sizes, rates, prefetch_depth
        self.intervals = list(trace.intervals())
        window = window_bytes(sizes, prefetch_depth)
        moments = trace.moments
        # Pinned chunks occupy the device whatever is planned. So their bytes are subtracted here, and forced intervals
        # have no bytes of their own in the programme.
        self.free_bytes = [
            budget_bytes - moment.nonmodel_bytes - window - sum(sizes[chunk].weight for chunk in moment.pinned)
            for moment in moments
        ]
        self.free_bytes.append(budget_bytes - trace.outside_bytes)
        tightest = min(self.free_bytes, default=0)
        if tightest < 0:
            raise ValueError(
                f"the device's budget of {in_mib(budget_bytes)} is too small for one window of chunks of "
                f"{in_mib(window)} and the rest of the model; the smallest that suffices is "
                f"{in_mib(budget_bytes - tightest)}"
            )
        wanted = sum(sizes[chunk].owned for chunk in constraints.owned)
        if wanted > tightest:
            raise ValueError(
                f"the device's budget of {in_mib(budget_bytes)} is too small for the {in_mib(wanted)} of the chunks "
                f"that it has to own; the smallest that suffices is {in_mib(budget_bytes - tightest + wanted)}"
            )
        self.ownable_bytes = tightest
        uses = [0] * len(sizes)
        for moment in moments:
            uses[moment.chunk] += 1
        self.uses = uses
        self.num_gradients = trace.gradients_per_chunk()
        self.interval_seconds = [
            0.0 if interval.forced else sizes[interval.chunk].weight / rates.upload for interval in self.intervals
        ]
        forced = [0] * len(sizes)
        for interval in self.intervals:
            forced[interval.chunk] += interval.forced
        self.forced = forced
        self.owned_seconds = [
            (uses[chunk] - forced[chunk]) * size.weight / rates.upload
            + self.num_gradients.get(chunk, 0) * size.gradient / rates.download
            for chunk, size in enumerate(sizes)
        ]

    def relax(self, least_owned: int, owned: set[int] | None = None) -> tuple[list[float], list[float], float]:
        """Solves the linear programme.

        Args:
            least_owned: the least bytes of chunks for the device to own.
            owned: the chunks owned by the device, if already decided.

        Returns:
            The owned share of each chunk, the kept share of each interval, and the moved bytes.
        """
        if not self.sizes:
            return [], [], 0.0
        from scipy.optimize import linprog

        gains = [*self.owned_seconds, *self.interval_seconds]
        most = max(gains) or 1.0
        at_most, equal = self._rows(least_owned)
        rest = at_most.num_columns - len(gains)
        solution = linprog(
            [-gain / most for gain in gains] + [0.0] * rest,
            A_ub=at_most.matrix(),
            b_ub=at_most.limits,
            A_eq=equal.matrix(),
            b_eq=equal.limits,
            bounds=[*self._bounds(owned), *[(0, None)] * rest],
            method="highs-ds",
        )
        if not solution.success:
            raise ValueError(f"no plan meets both budgets: {solution.message}")
        shares = solution.x.tolist()
        own, keep = shares[: len(self.sizes)], shares[len(self.sizes) : len(gains)]
        return own, keep, self._bytes(own, keep)

    def _rows(self, least_owned: int) -> tuple[_Rows, _Rows]:
        """Returns the inequalities and the equalities of the programme, with columns for y, x, Y and K.

        Y is the number of bytes of all owned chunks, K_t that of all intervals spanning the moment t. The row of a
        moment states only the difference K_t - K_(t-1). So rows have few entries, however long intervals are.
        """
        unit = max(size.owned for size in self.sizes)  # bytes are divided by it, to keep the matrix well scaled
        num_moments = len(self.trace.moments)
        total = len(self.sizes) + len(self.intervals)
        held = total + 1
        width = held + num_moments
        most, same = _Rows(width), _Rows(width)
        owned = {chunk: size.owned / unit for chunk, size in enumerate(self.sizes)}
        same.add({total: 1.0} | {chunk: -value for chunk, value in owned.items()}, 0.0)
        changes: list[dict[int, float]] = [
            {held + moment: 1.0, held + moment - 1: -1.0} for moment in range(num_moments)
        ]
        if changes:
            changes[0] = {held: 1.0}
        for column, interval in enumerate(self.intervals, start=len(self.sizes)):
            # y_c + x_i <= 1: an owned chunk needs no replica.
            most.add({interval.chunk: 1.0, column: 1.0}, 1.0)
            if not interval.forced and interval.begin + 1 < interval.end:
                weight = self.sizes[interval.chunk].weight / unit
                changes[interval.begin + 1][column] = -weight
                changes[interval.end][column] = weight
        for change in changes:
            same.add(change, 0.0)
        for moment in range(num_moments):
            most.add({total: 1.0, held + moment: 1.0}, self.free_bytes[moment] / unit)
        most.add({total: 1.0}, self.free_bytes[-1] / unit)  # outside of the uses
        if least_owned:
            most.add({total: -1.0}, -least_owned / unit)
        return most, same

    def _bounds(self, owned: set[int] | None) -> list[tuple[int, int]]:
        """Returns the bounds of each y and x; ``constraints`` and ``owned`` fix some of them to 0 or 1."""
        chunks = range(len(self.sizes))
        if owned is not None:
            bounds = [(int(chunk in owned),) * 2 for chunk in chunks]
        else:
            wanted, refused = self.constraints.owned, self.constraints.never_owned
            bounds = [(int(chunk in wanted), int(chunk not in refused)) for chunk in chunks]
        for interval in self.intervals:
            dropped = interval.chunk in self.constraints.fetched and not interval.forced
            bounds.append((0, 0) if dropped else (0, 1))
        return bounds

    def _bytes(self, owned: Sequence[float], kept: Sequence[float]) -> float:
        """Returns the bytes moved in a step with these shares of owned chunks and kept intervals."""
        moved = 0.0
        for chunk, size in enumerate(self.sizes):
            uploads = (self.uses[chunk] - self.forced[chunk]) * size.weight
            moved += (1 - owned[chunk]) * (uploads + self.num_gradients.get(chunk, 0) * size.gradient)
        for interval, share in zip(self.intervals, kept, strict=True):
            moved -= 0 if interval.forced else share * self.sizes[interval.chunk].weight
        return moved

    def round_owned(self, shares: Sequence[float], least_owned: int, num_more: int) -> set[int]:
        """Chooses whole chunks to own: by descending share, then by saved seconds per byte, while they fit.

        Args:
            shares: the relaxation's share of each chunk.
            least_owned: how many bytes to own at least.
            num_more: how many chunks to own in addition to the relaxation's bytes; fewer intervals are then kept.

        Raises:
            ValueError: whole chunks of these sizes do not fit both budgets.
        """
        # Shares are rounded, so noise of the solver does not decide the order.
        order = sorted(
            (chunk for chunk in range(len(self.sizes)) if shares[chunk] > 1e-6 and chunk not in self.constraints.owned),
            key=lambda chunk: (-round(shares[chunk], 6), -self.owned_seconds[chunk] / self.sizes[chunk].owned, chunk),
        )
        if least_owned:  # the host's budget counts more than the time of copies: any chunk may be owned
            chosen = set(order)
            order += [chunk for chunk in range(len(self.sizes)) if chunk not in chosen | self.constraints.never_owned]
        owned = set(self.constraints.owned)
        used = sum(self.sizes[chunk].owned for chunk in owned)
        planned = sum(share * size.owned for share, size in zip(shares, self.sizes, strict=True))
        planned += num_more * max((size.owned for size in self.sizes), default=0)
        for chunk in order:
            size = self.sizes[chunk].owned
            if chunk in owned:
                continue
            wanted = used + size <= planned * (1 + 1e-9) or used < least_owned
            if wanted and used + size <= self.ownable_bytes:
                owned.add(chunk)
                used += size
        if used < least_owned:
            raise ValueError("no plan meets both budgets with whole chunks; smaller chunks may")
        return owned

    def round_kept(self, owned: set[int], shares: Sequence[float]) -> set[int]:
        """Chooses whole intervals to keep: the best of three rules.

        If all chunks have the same size, the matrix of constraints has the consecutive-ones property. Its solutions are
        integers if the free bytes are multiples of the chunk size, so rounding then changes little.
        """
        free_bytes = [value - sum(self.sizes[chunk].owned for chunk in owned) for value in self.free_bytes]
        best: tuple[float, set[int]] = (-1.0, set())
        candidates = [
            index
            for index, interval in enumerate(self.intervals)
            if interval.chunk not in owned and (interval.forced or interval.chunk not in self.constraints.fetched)
        ]
        by_length = sorted(candidates, key=lambda index: self.intervals[index].end - self.intervals[index].begin)
        by_share = sorted(by_length, key=lambda index: -round(shares[index], 6))
        weights = [0 if interval.forced else self.sizes[interval.chunk].weight for interval in self.intervals]
        for kept in (
            retain_greedily(self.intervals, weights, by_share, free_bytes),
            retain_greedily(self.intervals, weights, by_length, free_bytes),
            retain_by_belady(self.intervals, weights, candidates, free_bytes),
        ):
            gain = sum(self.interval_seconds[index] for index in kept)
            if gain > best[0]:
                best = (gain, kept)
        return best[1]

    def seconds(self, plan: PlacementPlan) -> float:
        """Returns the time of all copies of a plan."""
        return plan.upload_bytes / self.rates.upload + plan.download_bytes / self.rates.download

    def plan(self, owned: set[int], kept: set[int], bound: float) -> PlacementPlan:
        """Makes the plan for a choice of owned chunks and kept intervals, and counts its bytes."""
        keep = [False] * len(self.trace.moments)
        for index, interval in enumerate(self.intervals):
            keep[interval.begin] = index in kept or interval.forced
        plan = PlacementPlan(self.trace, frozenset(owned), tuple(keep), 0, 0, bound, self.prefetch_depth)
        fetched = zip(self.trace.moments, plan.fetches(), strict=True)
        upload = sum(self.sizes[moment.chunk].weight for moment, fetches in fetched if fetches)
        downloaded = (chunk for chunk in self.num_gradients if chunk not in owned)
        download = sum(self.num_gradients[chunk] * self.sizes[chunk].gradient for chunk in downloaded)
        return replace(plan, upload_bytes=upload, download_bytes=download)
