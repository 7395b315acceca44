"""The layers of each rank of a pipeline: BaPipe (arXiv 2012.12544), for one stage and for two stages on a rank."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Shape = Literal["line", "rounds", "v"]
"""One stage on each rank; a second one in the same order of ranks; a second one in the reverse order."""
Fits = Callable[[int, Sequence[range]], bool]
"""Whether the memory of a rank holds these stages; if it does, it holds parts of them, too."""
Suits = Callable[[int, Sequence[range]], bool]
"""Whether a rank may have exactly these stages, whatever holds of parts of them."""
Sizes = tuple[int, ...]
"""Layers of each stage of a rank."""
_WIDER = (1.0, 1.05, 1.15, 1.3, 1.6, 2.5, math.inf)
_ROUNDING = 1e-12  # relative; sums in another order differ by it


@dataclass(frozen=True)
class _Path:
    """Stages of the first ranks. A lower ``cost`` is better."""

    cost: float
    stages: tuple[tuple[range, ...], ...]


def cut_layers(
    seconds: Sequence[Sequence[float]],
    shape: Shape,
    fits: Fits,
    suits: Suits = lambda rank, stages: True,
    kinds: Sequence[Hashable] | None = None,
) -> tuple[int, ...] | None:
    """The cut with the fastest slowest rank among the cuts within ``fits`` and ``suits``.

    Several cuts may be equally fast. Then the least sum of squares of the stages' seconds decides: stages of equal
    length wait least for each other.

    Args:
        seconds: rank -> seconds of a micro-batch in each layer on the rank's devices. The first layer includes the
            embeddings, the last layer the head.
        shape: of the schedule.
        kinds: of each layer. For layers of one kind ``fits`` and ``suits`` depend only on their number, and on whether
            the first or the last layer of the model is among them. None: each layer is of its own kind.

    Returns:
        the number of layers of each stage, in the order of the model; None if no cut fits.
    """
    if kinds is not None and len(set(kinds)) == 1 and all(len(set(each[1:-1])) == 1 for each in seconds):
        return _EqualLayers(seconds, shape, fits, suits).cut()
    cutter = _Cutter(seconds, shape, fits, suits)
    middles = range(len(seconds), len(seconds[0]) + 1) if shape == "rounds" else (0,)
    slowest = _least_costs(cutter, middles)
    if not slowest:
        return None
    bound = min(slowest.values())
    best_of = [middle for middle, seconds in slowest.items() if seconds <= bound * (1 + _ROUNDING)]
    paths = [cutter.best(middle, bound, cutter.more_squares) for middle in best_of]
    best = min((path for path in paths if path is not None), key=lambda path: path.cost)
    stages = sorted((stage for of_rank in best.stages for stage in of_rank), key=lambda stage: stage.start)
    return tuple(len(stage) for stage in stages)


def _least_costs(cutter: _Cutter, middles: Sequence[int]) -> dict[int, float]:
    """Middle -> seconds of the slowest rank of the best cut.

    Middles without a cut within the least bound that has one are left out: they are certainly not the best.
    """
    for wider in _WIDER:  # low bounds leave few paths, and mostly one of the first bounds has a path
        bound = min(cutter.least_seconds * wider, cutter.most_seconds)
        found = {middle: cutter.best(middle, bound, cutter.slower) for middle in middles}
        costs = {middle: path.cost for middle, path in found.items() if path is not None}
        if costs or bound == cutter.most_seconds:
            return costs
    raise AssertionError("the last bound excludes nothing")


class _EqualLayers:
    """Cuts of equal layers, apart from the embeddings before the first and the head after the last one.

    The seconds of a rank depend on the number of layers of each of its stages, not on their positions. So it is enough
    to divide a number of layers over the ranks. Dynamic programming over positions is not needed; its work grows with
    the fourth power of their number.
    """

    def __init__(self, seconds: Sequence[Sequence[float]], shape: Shape, fits: Fits, suits: Suits) -> None:
        self._shape, self._fits, self._suits = shape, fits, suits
        self._ranks, self._layers, self._stages = len(seconds), len(seconds[0]), 1 if shape == "line" else 2
        self._each = [own[1] for own in seconds]
        # Rank -> seconds on top of equal layers, in its first and in its last stage.
        self._first = [seconds[0][0] - self._each[0], *[0.0] * (self._ranks - 1)]
        self._last = [0.0] * self._ranks
        head = 0 if shape == "v" else self._ranks - 1
        self._last[head] = seconds[head][-1] - self._each[head]
        self._splits: dict[tuple[int, int], Sizes | None] = {}
        self._stairs: dict[int, list[int]] = {}  # rank -> the largest second stage for each size of the first one
        self._most_that_fit = [self._layers - self._stages * (self._ranks - 1)] * self._ranks  # as far as is known

    def cut(self) -> tuple[int, ...] | None:
        """See ``cut_layers``."""
        least = self._stages
        if self._layers < self._ranks * least:
            return None
        if not all(self._suits(rank, self._held(rank, (1,) * least)) for rank in range(self._ranks)):
            return None
        seconds = sorted({self._seconds(rank, n) for rank in range(self._ranks) for n in self._counts(self._layers)})
        if sum(self._most(seconds[-1])) < self._layers:
            return None
        # The number of layers that all ranks hold together grows with the bound, so bisection finds the least bound.
        place = bisect.bisect_left(seconds, self._layers, key=lambda bound: sum(self._most(bound)))
        sizes = self._most_equal(self._most(seconds[place]))
        first, second = [each[0] for each in sizes], [each[1] for each in sizes if len(each) > 1]
        return (*first, *(reversed(second) if self._shape == "v" else second))

    def _most_equal(self, most: Sequence[int]) -> list[Sizes]:
        """The sizes of the stages with the least sum of squares. No rank has more layers than ``most``."""
        paths: dict[int, tuple[float, list[Sizes]]] = {0: (0.0, [])}
        for rank, highest in enumerate(most):
            later = most[rank + 1 :]
            low, high = self._layers - sum(later), self._layers - self._stages * len(later)
            after: dict[int, tuple[float, list[Sizes]]] = {}
            for before, (cost, sizes) in paths.items():
                for count in range(max(self._stages, low - before), min(highest, high - before) + 1):
                    split = self._split(rank, count)
                    assert split is not None, "a rank that holds more layers holds these"
                    squares = cost + sum(each**2 for each in self._stage_seconds(rank, split))
                    if before + count not in after or squares < after[before + count][0]:
                        after[before + count] = squares, [*sizes, split]
            paths = after
        return paths[self._layers][1]

    def _most(self, bound: float) -> list[int]:
        """Rank -> the most layers within its memory and ``bound`` seconds. All are 0 if a rank cannot have a stage."""
        found, limit = [], bound * (1 + _ROUNDING)
        for rank in range(self._ranks):
            counts = self._counts(self._most_that_fit[rank])
            within = bisect.bisect_right(counts, limit, key=functools.partial(self._seconds, rank))
            if within and self._split(rank, counts[within - 1]) is None:
                within = bisect.bisect_left(counts, True, hi=within, key=functools.partial(self._exceeds, rank))
                self._most_that_fit[rank] = counts[within - 1] if within else 0
            found.append(counts[within - 1] if within else 0)
        return found if all(found) else [0] * self._ranks

    def _counts(self, most: int) -> range:
        """The possible numbers of layers of a rank."""
        return range(self._stages, most + 1)

    def _seconds(self, rank: int, count: int) -> float:
        return count * self._each[rank] + self._first[rank] + self._last[rank]

    def _stage_seconds(self, rank: int, sizes: Sizes) -> list[float]:
        found = [size * self._each[rank] for size in sizes]
        found[0] += self._first[rank]
        found[-1] += self._last[rank]
        return found

    def _exceeds(self, rank: int, count: int) -> bool:
        return self._split(rank, count) is None

    def _split(self, rank: int, count: int) -> Sizes | None:
        """The fitting sizes of a rank's stages with ``count`` layers and the most equal seconds, or None."""
        if (rank, count) not in self._splits:
            choices: Iterator[Sizes] = iter(((count,),)) if self._stages == 1 else self._pairs(rank, count)
            best = next(choices)
            if self._fits(rank, self._held(rank, best)):
                self._splits[rank, count] = best
            else:
                fitting = (sizes for sizes in choices if self._is_below_stairs(rank, *sizes))
                self._splits[rank, count] = next(fitting, None)
        return self._splits[rank, count]

    def _is_below_stairs(self, rank: int, first: int, second: int) -> bool:
        """Whether two stages of these sizes fit.

        The more layers the first stage has, the fewer fit into the second one. So a walk along the largest pairs that
        fit answers for all pairs. Its length does not depend on the layers of the model, only on those that fit.
        """
        if rank not in self._stairs:
            most = self._layers - self._stages * (self._ranks - 1)

            def exceeds(first: int, second: int) -> bool:
                return not self._fits(rank, self._held(rank, (first, second)))

            sizes = range(1, most)
            left = bisect.bisect_left(sizes, True, key=functools.partial(exceeds, 1))
            stairs: list[int] = []
            while left:
                stairs.append(left)
                left = min(left, most - len(stairs) - 1)
                while left and exceeds(len(stairs) + 1, left):
                    left -= 1
            self._stairs[rank] = stairs
        stairs = self._stairs[rank]
        return first <= len(stairs) and second <= stairs[first - 1]

    def _pairs(self, rank: int, count: int) -> Iterator[Sizes]:
        """The sizes of two stages, the most equal seconds first."""
        middle = count / 2
        if self._each[rank] > 0:
            middle += (self._last[rank] - self._first[rank]) / (2 * self._each[rank])
        below = min(max(math.floor(middle), 0), count - 1)
        above = below + 1
        while below >= 1 or above <= count - 1:
            if above > count - 1 or (below >= 1 and middle - below <= above - middle):
                yield below, count - below
                below -= 1
            else:
                yield above, count - above
                above += 1

    def _held(self, rank: int, sizes: Sizes) -> list[range]:
        """Stages of these sizes, at positions with the fewest possible layers of other ranks before and after them."""
        after = rank if self._shape == "v" else self._ranks - 1 - rank
        end = self._layers - after
        if len(sizes) == 1 and rank < self._ranks - 1:
            return [range(rank, rank + sizes[0])]
        return [*(range(rank, rank + size) for size in sizes[:-1]), range(end - sizes[-1], end)]


class _Cutter:
    """Dynamic programming over ranks.

    The first ranks hold the first layers of the model. If ranks have a second stage, they also hold the first layers
    after ``middle``, or in a V the last layers of the model.
    """

    def __init__(self, seconds: Sequence[Sequence[float]], shape: Shape, fits: Fits, suits: Suits) -> None:
        self._sums = [[0.0, *itertools.accumulate(each)] for each in seconds]
        fastest = [min(layer) for layer in zip(*seconds, strict=True)]
        self._least = [0.0, *itertools.accumulate(fastest)]
        # Searches with other bounds and middles ask for mostly the same stages, so answers are cached.
        self._shape, self._fits, self._suits = shape, functools.cache(fits), suits
        self._ranks, self._layers = len(seconds), len(seconds[0])
        self.least_seconds = max(self._least[-1] / self._ranks, max(fastest))
        self.most_seconds = max(sums[-1] for sums in self._sums)

    def best(self, middle: int, bound: float, add: Callable[[float, Sequence[float]], float]) -> _Path | None:
        """The path of least cost with at most ``bound`` seconds on each rank."""
        limit = bound * (1 + _ROUNDING)
        paths = {(0, 0): _Path(0.0, ())}
        for rank in range(self._ranks):
            after: dict[tuple[int, int], _Path] = {}
            for (first, second), path in paths.items():
                for stages in self._choices(rank, first, second, middle, limit):
                    times = [self._time(rank, (stage,)) for stage in stages]
                    place = first + len(stages[0]), second + sum(map(len, stages[1:]))
                    cost = add(path.cost, times)
                    known = after.get(place)
                    if known is None or cost < known.cost:
                        after[place] = _Path(cost, (*path.stages, stages))
            paths = after
        return min(paths.values(), key=lambda path: path.cost, default=None)  # the last rank leaves nothing

    @staticmethod
    def slower(cost: float, times: Sequence[float]) -> float:
        """The seconds of the slowest rank."""
        return max(cost, sum(times))

    @staticmethod
    def more_squares(cost: float, times: Sequence[float]) -> float:
        """The sum of squares of the stages' seconds."""
        return cost + sum(seconds**2 for seconds in times)

    def _choices(self, rank: int, first: int, second: int, middle: int, limit: float) -> Iterator[tuple[range, ...]]:
        """The possible stages of a rank after ``first`` and ``second`` layers of the earlier ranks."""
        total = self._layers
        end = {"line": total, "rounds": middle, "v": total - second}[self._shape]
        for stop in range(first + 1, end + 1):
            stage = range(first, stop)
            if self._time(rank, (stage,)) > limit or not self._fits(rank, (stage,)):
                return
            if self._shape == "line":
                if self._enough(rank, (range(stop, total),), limit) and self._suits(rank, (stage,)):
                    yield (stage,)
                continue
            for more in range(self._least_more(rank, stop, second, middle, limit), total - second + 1):
                if self._shape == "v":
                    other = range(total - second - more, total - second)
                    left: tuple[range, ...] = (range(stop, other.start),)
                else:
                    other = range(middle + second, middle + second + more)
                    left = (range(stop, middle), range(other.stop, total))
                if other.stop > total or other.start < stop or self._time(rank, (stage, other)) > limit:
                    break
                if not self._fits(rank, (stage, other)):
                    break
                if self._enough(rank, left, limit) and self._suits(rank, (stage, other)):
                    yield stage, other

    def _least_more(self, rank: int, stop: int, second: int, middle: int, limit: float) -> int:
        """A lower bound of the layers of a second stage. With fewer the other ranks could not compute the rest."""
        able, least, total = (self._ranks - 1 - rank) * limit, self._least, self._layers
        if self._shape == "v":
            more = total - second + 1 - bisect.bisect_right(least, least[stop] + able)
        else:
            more = bisect.bisect_left(least, least[middle] - least[stop] + least[total] - able) - middle - second
        return max(1, more - 1)  # one less, as ``_enough`` rounds its sums in another order

    def _enough(self, rank: int, left: Sequence[range], limit: float) -> bool:
        """Whether the later ranks get a layer for each of their stages, and can compute all layers left to them."""
        others = self._ranks - 1 - rank
        if others == 0:
            return not any(left)
        stages = others * (2 if self._shape == "v" else 1)  # in each part of the layers left
        seconds = sum(self._least[part.stop] - self._least[part.start] for part in left)
        return all(len(part) >= stages for part in left) and seconds <= others * limit

    def _time(self, rank: int, stages: Sequence[range]) -> float:
        sums, seconds = self._sums[rank], 0.0
        for stage in stages:  # a loop, since a search asks millions of times
            seconds += sums[stage.stop] - sums[stage.start]
        return seconds
