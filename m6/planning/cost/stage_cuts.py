"""Which layers each rank of a pipeline gets: BaPipe (arXiv 2012.12544), for one stage and for two stages on a rank."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Shape = Literal["line", "rounds", "v"]
"""One stage on each rank; a second one in the same order of ranks; a second one in the reverse order."""
Fits = Callable[[int, Sequence[range]], bool]
"""Whether the memory of a rank holds these stages; if it does, it holds parts of them, too."""
Suits = Callable[[int, Sequence[range]], bool]
"""Whether a rank may have exactly these stages, whatever holds of parts of them."""
_WIDER = (1.0, 1.05, 1.15, 1.3, 1.6, 2.5, math.inf)
_ROUNDING = 1e-12  # of sums in another order


@dataclass(frozen=True)
class _Path:
    """Stages of the first ranks: ``cost`` is the lower the better."""

    cost: float
    stages: tuple[tuple[range, ...], ...]


def cut_layers(
    seconds: Sequence[Sequence[float]], shape: Shape, fits: Fits, suits: Suits = lambda rank, stages: True
) -> tuple[int, ...] | None:
    """The cut that fits and suits every rank and whose slowest rank is as fast as possible.

    Of several such cuts the one with the least sum of squares of the stages' seconds is taken: stages of equal length
    wait least for each other.

    Args:
        seconds: rank -> seconds of a micro-batch in each layer on the rank's devices, with those of the embeddings in
            the first and those of the head in the last layer.
        shape: of the schedule.

    Returns:
        the number of layers of each stage, in the order of the model; None if no cut fits.
    """
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
    """Middle -> seconds of the slowest rank of the best cut; without middles that are certainly not the best."""
    for wider in _WIDER:  # low bounds leave few paths, and mostly one of the first is met
        bound = min(cutter.least_seconds * wider, cutter.most_seconds)
        found = {middle: cutter.best(middle, bound, cutter.slower) for middle in middles}
        costs = {middle: path.cost for middle, path in found.items() if path is not None}
        if costs or bound == cutter.most_seconds:
            return costs
    raise AssertionError("the last bound excludes nothing")


class _Cutter:
    """Dynamic programming over ranks. What the first ranks hold is a first part of the layers and, if ranks have a
    second stage, a second part: of what follows ``middle``, or, in a V, of what is left, from the end."""

    def __init__(self, seconds: Sequence[Sequence[float]], shape: Shape, fits: Fits, suits: Suits) -> None:
        self._sums = [[0.0, *itertools.accumulate(each)] for each in seconds]
        fastest = [min(layer) for layer in zip(*seconds, strict=True)]
        self._least = [0.0, *itertools.accumulate(fastest)]
        # Each bound and each middle asks for much the same stages.
        self._shape, self._fits, self._suits = shape, functools.cache(fits), suits
        self._ranks, self._layers = len(seconds), len(seconds[0])
        self.least_seconds = max(self._least[-1] / self._ranks, max(fastest))
        self.most_seconds = max(sums[-1] for sums in self._sums)

    def best(self, middle: int, bound: float, add: Callable[[float, Sequence[float]], float]) -> _Path | None:
        """The path of least cost on which no rank takes longer than ``bound``."""
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
        """The stages that a rank can get after the first ranks have got ``first`` and ``second`` layers."""
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
        """Layers of a second stage with fewer of which more would be left than the other ranks can compute."""
        able, least, total = (self._ranks - 1 - rank) * limit, self._least, self._layers
        if self._shape == "v":
            more = total - second + 1 - bisect.bisect_right(least, least[stop] + able)
        else:
            more = bisect.bisect_left(least, least[middle] - least[stop] + least[total] - able) - middle - second
        return max(1, more - 1)  # one less, as these sums are rounded in another order than those of ``_enough``

    def _enough(self, rank: int, left: Sequence[range], limit: float) -> bool:
        """Whether the ranks after this one get a layer for each of their stages, and not more than they can compute."""
        others = self._ranks - 1 - rank
        if others == 0:
            return not any(left)
        stages = others * (2 if self._shape == "v" else 1)  # in each part of what is left
        seconds = sum(self._least[part.stop] - self._least[part.start] for part in left)
        return all(len(part) >= stages for part in left) and seconds <= others * limit

    def _time(self, rank: int, stages: Sequence[range]) -> float:
        sums, seconds = self._sums[rank], 0.0
        for stage in stages:  # a loop, since a search asks millions of times
            seconds += sums[stage.stop] - sums[stage.start]
        return seconds
