"""Which chunks the device owns, and which it keeps from one use to the next, under the byte budget.

Per chunk c: y_c = 1 where the device owns it, with its optimizer state, so that nothing of it ever moves. Per
interval i between two uses of a chunk in a step: x_i = 1 where it stays, so that one upload is saved. At each moment
t, and outside of the uses,

    sum over c: owned_bytes_c y_c  +  sum over i that span t: weight_bytes_i x_i  <=  budget - non-model_t - window

and y_c + x_i <= 1. What is saved is maximised: a linear programme, whose vertices have few fractional values. They
are rounded down, or up by a chunk or two, whatever saves most, and the room that is left is filled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.device import Rates
from offload.keeping import fill, sweep
from offload.sizes import ChunkBytes, window_bytes
from offload.trace import Trace

_ROUNDINGS = 3


@dataclass(frozen=True)
class Wishes:
    """What somebody decided, and the plan has to follow; numbers of chunks.

    Attributes:
        owned: live on the device.
        streamed: do not.
        fetched: do not, and leave it before another chunk is used.
    """

    owned: frozenset[int] = frozenset()
    streamed: frozenset[int] = frozenset()
    fetched: frozenset[int] = frozenset()

    @property
    def never_owned(self) -> frozenset[int]:
        return self.streamed | self.fetched


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        trace: the step that it is for.
        owned: numbers of the chunks that live on the device.
        keep: per moment of the trace, whether its chunk stays on the device until it is used again.
        upload_bytes, download_bytes: moved per step.
        bound_bytes: the least that any plan moves, the optimum of the linear programme: uploads and downloads.
        prefetch_depth: uploads that are under way ahead of their use.
    """

    trace: Trace
    owned: frozenset[int]
    keep: tuple[bool, ...]
    upload_bytes: int
    download_bytes: int
    bound_bytes: float
    prefetch_depth: int = 1

    def fetches(self) -> list[bool]:
        """At every moment, whether its chunk has to come up for it."""
        resident: set[int] = set()
        found = []
        for moment, stays in zip(self.trace.moments, self.keep, strict=True):
            found.append(moment.chunk not in self.owned and moment.chunk not in resident)
            (resident.add if stays else resident.discard)(moment.chunk)
        return found

    def resident_bytes(self, sizes: Sequence[ChunkBytes]) -> list[int]:
        """What chunks occupy at every moment: those owned, those kept, and the one in use; no copies in flight."""
        of_owned = sum(sizes[chunk].owned for chunk in self.owned)
        resident: set[int] = set()
        totals = []
        for moment, stays in zip(self.trace.moments, self.keep, strict=True):
            present = (resident | {moment.chunk, *moment.pinned}) - self.owned
            totals.append(of_owned + sum(sizes[chunk].weight for chunk in present))
            (resident.add if stays else resident.discard)(moment.chunk)
        return totals

    @property
    def moved_bytes(self) -> int:
        return self.upload_bytes + self.download_bytes


def solve(
    trace: Trace,
    sizes: Sequence[ChunkBytes],
    budget_bytes: int,
    prefetch_depth: int = 1,
    rates: Rates | None = None,
    host_budget_bytes: int | None = None,
    wishes: Wishes | None = None,
) -> Plan:
    """The plan that moves the fewest weighted bytes.

    Args:
        sizes: of the chunks, by number.
        budget_bytes: of the device.
        rates: of the copies; the update on the host costs nothing.
        host_budget_bytes: what the chunks that the device does not own may occupy there, each as many as
            ``ChunkBytes.owned``.

    Raises:
        ValueError: a budget is too small; the message has the smallest that would do.
    """
    problem = _Problem(trace, sizes, budget_bytes, prefetch_depth, rates or Rates(), wishes or Wishes())
    least_owned = 0
    if host_budget_bytes is not None:
        least_owned = max(0, sum(size.owned for size in sizes) - host_budget_bytes)
        if least_owned > problem.room_for_owned:
            raise ValueError(
                f"the host's budget of {host_budget_bytes} bytes is too small: beside what the device can own, the "
                f"host has to hold {sum(size.owned for size in sizes) - problem.room_for_owned}"
            )
    owned_share, _, bound = problem.relax(least_owned)
    plans: list[Plan] = []
    for num_more in range(_ROUNDINGS):
        owned = problem.round_owned(owned_share, least_owned, num_more)
        if plans and owned == plans[-1].owned:
            break
        _, kept_share, _ = problem.relax(0, owned)
        plans.append(problem.plan(owned, problem.round_kept(owned, kept_share), bound))
    return min(plans, key=problem.seconds)


class _Problem:
    """The numbers of the programme, and the steps of its solution."""

    def __init__(
        self,
        trace: Trace,
        sizes: Sequence[ChunkBytes],
        budget_bytes: int,
        prefetch_depth: int,
        rates: Rates,
        wishes: Wishes,
    ) -> None:
        self.wishes = wishes
        self.trace, self.sizes, self.rates, self.prefetch_depth = trace, sizes, rates, prefetch_depth
        self.intervals = list(trace.intervals())
        window = window_bytes(sizes, prefetch_depth)
        moments = trace.moments
        # Pinned chunks need their room whatever is planned; that of an interval that is forced is counted here.
        self.room = [
            budget_bytes - moment.nonmodel_bytes - window - sum(sizes[chunk].weight for chunk in moment.pinned)
            for moment in moments
        ]
        self.room.append(budget_bytes - trace.outside_bytes)
        tightest = min(self.room, default=0)
        if tightest < 0:
            raise ValueError(
                f"the device's budget of {budget_bytes} bytes is too small for one window of chunks of {window} bytes "
                f"beside the rest of the model; the smallest that would do is {budget_bytes - tightest}"
            )
        wanted = sum(sizes[chunk].owned for chunk in wishes.owned)
        if wanted > tightest:
            raise ValueError(
                f"the device's budget of {budget_bytes} bytes is too small for the {wanted} bytes of the chunks that "
                f"it is to own; the smallest that would do is {budget_bytes - tightest + wanted}"
            )
        self.room_for_owned = tightest
        uses = [0] * len(sizes)
        for moment in moments:
            uses[moment.chunk] += 1
        self.uses = uses
        self.arrivals = trace.gradient_arrivals()
        self.interval_seconds = [
            0.0 if interval.forced else sizes[interval.chunk].weight / rates.upload for interval in self.intervals
        ]
        forced = [0] * len(sizes)
        for interval in self.intervals:
            forced[interval.chunk] += interval.forced
        self.forced = forced
        self.owned_seconds = [
            (uses[chunk] - forced[chunk]) * size.weight / rates.upload
            + self.arrivals.get(chunk, 0) * size.gradient / rates.download
            for chunk, size in enumerate(sizes)
        ]

    def relax(self, least_owned: int, owned: set[int] | None = None) -> tuple[list[float], list[float], float]:
        """The linear programme: shares of chunks owned and of intervals kept, and the bytes of its optimum.

        Args:
            owned: the chunks owned, where that is decided.
        """
        if not self.sizes:
            return [], [], 0.0
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        num_chunks, num_moments = len(self.sizes), len(self.room)
        rows: list[int] = []
        columns: list[int] = []
        values: list[float] = []
        unit = max(size.owned for size in self.sizes)  # keeps the matrix well scaled

        def add(row: int, column: int, value: float) -> None:
            rows.append(row)
            columns.append(column)
            values.append(value)

        for chunk, size in enumerate(self.sizes):
            for moment in range(num_moments):
                add(moment, chunk, size.owned / unit)
        limits = [room / unit for room in self.room]
        for index, interval in enumerate(self.intervals):
            column = num_chunks + index
            if not interval.forced:
                for moment in range(interval.begin + 1, interval.end):
                    add(moment, column, self.sizes[interval.chunk].weight / unit)
            add(len(limits), interval.chunk, 1.0)
            add(len(limits), column, 1.0)
            limits.append(1.0)
        if least_owned:
            for chunk, size in enumerate(self.sizes):
                add(len(limits), chunk, -size.owned / unit)
            limits.append(-least_owned / unit)
        gains = [*self.owned_seconds, *self.interval_seconds]
        most = max(gains) or 1.0
        matrix = coo_array((values, (rows, columns)), shape=(len(limits), len(gains))).tocsr()
        bounds = [(0, 1)] * len(gains)
        for chunk in range(num_chunks):
            bounds[chunk] = (int(chunk in self.wishes.owned), int(chunk not in self.wishes.never_owned))
        for index, interval in enumerate(self.intervals):
            if interval.chunk in self.wishes.fetched and not interval.forced:
                bounds[num_chunks + index] = (0, 0)
        if owned is not None:
            bounds[:num_chunks] = [(int(chunk in owned),) * 2 for chunk in range(num_chunks)]
        solution = linprog([-gain / most for gain in gains], A_ub=matrix, b_ub=limits, bounds=bounds, method="highs-ds")
        if not solution.success:
            raise ValueError(f"no plan meets both budgets: {solution.message}")
        shares = solution.x.tolist()
        own, keep = shares[:num_chunks], shares[num_chunks:]
        return own, keep, self._bytes(own, keep)

    def _bytes(self, owned: Sequence[float], kept: Sequence[float]) -> float:
        moved = 0.0
        for chunk, size in enumerate(self.sizes):
            every = (self.uses[chunk] - self.forced[chunk]) * size.weight
            moved += (1 - owned[chunk]) * (every + self.arrivals.get(chunk, 0) * size.gradient)
        for interval, share in zip(self.intervals, kept, strict=True):
            moved -= 0 if interval.forced else share * self.sizes[interval.chunk].weight
        return moved

    def round_owned(self, shares: Sequence[float], least_owned: int, num_more: int) -> set[int]:
        """Whole chunks: in the order of their shares, then of what a byte saves, while they fit.

        Args:
            num_more: so many chunks beyond what the relaxation owns; then less is kept.
        """
        order = sorted(
            (chunk for chunk in range(len(self.sizes)) if shares[chunk] > 1e-6 and chunk not in self.wishes.owned),
            key=lambda chunk: (-round(shares[chunk], 6), -self.owned_seconds[chunk] / self.sizes[chunk].owned, chunk),
        )
        if least_owned:  # whatever it costs, the host must not hold more
            chosen = set(order)
            order += [chunk for chunk in range(len(self.sizes)) if chunk not in chosen | self.wishes.never_owned]
        owned = set(self.wishes.owned)
        used = sum(self.sizes[chunk].owned for chunk in owned)
        planned = sum(share * size.owned for share, size in zip(shares, self.sizes, strict=True))
        planned += num_more * max((size.owned for size in self.sizes), default=0)
        for chunk in order:
            size = self.sizes[chunk].owned
            if chunk in owned:
                continue
            wanted = used + size <= planned * (1 + 1e-9) or used < least_owned
            if wanted and used + size <= self.room_for_owned:
                owned.add(chunk)
                used += size
        if used < least_owned:
            raise ValueError("no plan meets both budgets with whole chunks; smaller chunks may")
        return owned

    def round_kept(self, owned: set[int], shares: Sequence[float]) -> set[int]:
        """Whole intervals, each that fits: those of the relaxation first, then the shortest.

        Chunks of equal size make the intervals' matrix one of consecutive ones, whose vertices are whole where the
        room is a multiple of the size; the repair then changes little.
        """
        room = [value - sum(self.sizes[chunk].owned for chunk in owned) for value in self.room]
        best: tuple[float, set[int]] = (-1.0, set())
        candidates = [
            index
            for index, interval in enumerate(self.intervals)
            if interval.chunk not in owned and (interval.forced or interval.chunk not in self.wishes.fetched)
        ]
        by_length = sorted(candidates, key=lambda index: self.intervals[index].end - self.intervals[index].begin)
        by_share = sorted(by_length, key=lambda index: -round(shares[index], 6))
        weights = [0 if interval.forced else self.sizes[interval.chunk].weight for interval in self.intervals]
        for kept in (
            fill(self.intervals, weights, by_share, room),
            fill(self.intervals, weights, by_length, room),
            sweep(self.intervals, weights, candidates, room),
        ):
            gain = sum(self.interval_seconds[index] for index in kept)
            if gain > best[0]:
                best = (gain, kept)
        return best[1]

    def seconds(self, plan: Plan) -> float:
        """Of all its copies."""
        return plan.upload_bytes / self.rates.upload + plan.download_bytes / self.rates.download

    def plan(self, owned: set[int], kept: set[int], bound: float) -> Plan:
        keep = [False] * len(self.trace.moments)
        for index, interval in enumerate(self.intervals):
            keep[interval.begin] = index in kept or interval.forced
        plan = Plan(self.trace, frozenset(owned), tuple(keep), 0, 0, bound, self.prefetch_depth)
        fetched = zip(self.trace.moments, plan.fetches(), strict=True)
        upload = sum(self.sizes[moment.chunk].weight for moment, comes in fetched if comes)
        sent = (chunk for chunk in self.arrivals if chunk not in owned)
        download = sum(self.arrivals[chunk] * self.sizes[chunk].gradient for chunk in sent)
        return replace(plan, upload_bytes=upload, download_bytes=download)
