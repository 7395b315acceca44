"""How the micro-batches of a step are divided over ranks, and the key ``m6.parallel.shares``.

Each rank has a contiguous part of a step. Parts are equal as far as the batch allows, or as a run states them: Whale
(arXiv 2011.09208) gives unlike devices shares in proportion to their speeds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from m6.config.pipeline import PipelineSettings
from m6.errors import UserError

KEY = "m6.parallel.shares"


def apportion(
    number: int, speeds: Sequence[float], capacities: Sequence[int] | None = None, least: int = 0
) -> list[int]:
    """Divides units of work over unequal workers so that the last one ends early: Whale, algorithm 1.

    Each unit goes to the worker that would end first with it. This is optimal if a unit takes a constant time on each.
    Units as many as the sum of whole speeds are divided into just these.

    Args:
        number: of units.
        speeds: units a second of each worker.
        capacities: the most units of each; None: any number.
        least: units that each one has.

    Raises:
        UserError: the workers cannot hold so many units.
    """
    limits = [number] * len(speeds) if capacities is None else list(capacities)
    if sum(limits) < number:
        raise UserError(f"{number} rows do not fit devices that hold {sum(limits)}")
    found = [least] * len(speeds)
    ends = [((least + 1) / speed, worker) for worker, speed in enumerate(speeds) if limits[worker] > least]
    heapq.heapify(ends)
    for _ in range(number - sum(found)):
        _, first = heapq.heappop(ends)
        found[first] += 1
        if found[first] < limits[first]:
            heapq.heappush(ends, ((found[first] + 1) / speeds[first], first))
    return found


@dataclass(frozen=True)
class BatchSplit:
    """Divides the micro-batches of a step over the ranks that read different ones.

    Attributes:
        micro_batch_size: samples of a micro-batch.
        ranks: that read different micro-batches, in the order of their parts of a step.
        ep_size: ranks of a stage that exchange tokens.
        tensor_size: ranks of a tensor group, which read the same micro-batches and divide tokens of experts.
        at_once: interleaved micro-batches of a rank.
        stated: ``m6.parallel.shares``; None: equal shares, as far as possible.
        pipeline: through which the micro-batches of a rank pass.
        equal_for: why all ranks need as many micro-batches, as clauses; empty: they do not.
        accumulation: ``gradient_accumulation_steps``, if the JSON states it; then a smaller micro-batch is no remedy.
    """

    micro_batch_size: int
    ranks: int
    ep_size: int = 1
    tensor_size: int = 1
    at_once: int = 1
    stated: tuple[int, ...] | None = None
    pipeline: PipelineSettings | None = None
    equal_for: tuple[str, ...] = ()
    accumulation: int | None = None

    @property
    def neighbours(self) -> int:
        """Ranks of a group: neighbours along ``dp`` that exchange tokens, so they compute equally many micro-batches.

        An exchange is between ``ep_size`` neighbours of a stage, whole tensor groups or parts of them. Where neither
        size divides the other, exchanges overlap, and a group has all ranks of those that do.
        """
        return math.lcm(self.ep_size, self.tensor_size) // self.tensor_size

    @property
    def groups(self) -> int:
        """Groups of ``neighbours`` ranks."""
        return self.ranks // self.neighbours

    @property
    def unit(self) -> int:
        """The least number of micro-batches that a group can compute."""
        return self.neighbours * self.at_once

    def shares(self, samples: int) -> tuple[int, ...]:
        """The micro-batches of each rank in a step of so many samples, which has no refusal.

        A batch of another size than that of the stated shares is divided in proportion to them.
        """
        number = samples // self.micro_batch_size
        if self.stated is None:
            each, more = divmod(number // self.unit, self.groups)
            return self._of_ranks([each + 1] * more + [each] * (self.groups - more))
        own = self._stated_shares()
        return own if sum(own) == number else self.in_proportion(samples, self._sums_of_groups(own))

    def in_proportion(self, samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
        """The micro-batches of each rank in proportion to the speeds of the groups; a batch that has no refusal."""
        return self._of_ranks(apportion(samples // self.micro_batch_size // self.unit, speeds, least=1))

    def _of_ranks(self, units: Sequence[int]) -> tuple[int, ...]:
        """The micro-batches of each rank for the units of each group."""
        return tuple(self.at_once * count for count in units for _ in range(self.neighbours))

    def _sums_of_groups(self, shares: Sequence[int]) -> list[int]:
        size = self.neighbours
        return [sum(shares[first : first + size]) for first in range(0, self.ranks, size)]

    def most(self, samples: int) -> int:
        """The micro-batches of the rank with most of them."""
        if self.stated is None:
            return -(-samples // (self.micro_batch_size * self.unit * max(1, self.groups))) * self.at_once
        return max(self.shares(samples))

    def _stated_shares(self) -> tuple[int, ...]:
        """The stated share of each rank."""
        assert self.stated is not None
        block = self.ranks // len(self.stated)
        return tuple(share for share in self.stated for _ in range(block))

    # What cannot be divided

    def check(self, key: str, samples: int, is_final: bool = True) -> None:
        """Raises UserError with all reasons why the ranks cannot compute a batch, and the nearest setting.

        Args:
            key: that sets the batch, for the message.
            is_final: whether the stated shares are those of this batch.
        """
        reasons = list(self.refusals(samples, is_final))
        if not reasons:
            return
        name = f"{key} {samples}"
        text = reasons[0] if len(reasons) == 1 else "; ".join(f"({n}) {each}" for n, each in enumerate(reasons, 1))
        raise UserError(f"{name}: {text}; {self._remedy(key, samples)}")

    def refusals(self, samples: int, is_final: bool = True) -> Iterator[str]:
        """Why the ranks cannot compute a batch of so many samples: clauses; none if they can."""
        micro, number = self.micro_batch_size, samples // self.micro_batch_size
        if samples % micro:
            yield f"it is not a multiple of train_micro_batch_size_per_gpu {micro}"
            return
        if self.stated is not None:
            stated = list(self._refusals_of_stated(number, is_final))
            yield from stated
            if stated:
                return
        as_stated = self.stated is not None and sum(self._stated_shares()) == number
        if not as_stated and (number % self.unit or number // self.unit < self.groups):
            yield self._too_few(number)
            return
        shares = self.shares(samples)
        if len(set(shares)) > 1 and self.equal_for:
            per_step = micro * self.ranks * self.at_once
            yield f"it is not a multiple of {self._product()} = {per_step}, and {' and '.join(self.equal_for)}"
            return
        for share in sorted(set(shares)):
            refusal = None if self.pipeline is None else self.pipeline.micro_batches_refusal(share)
            if refusal is not None:
                yield refusal

    def _refusals_of_stated(self, number: int, is_final: bool) -> Iterator[str]:
        assert self.stated is not None
        text = f"{KEY} {list(self.stated)}"
        if self.ranks % len(self.stated):
            yield f"{text} has {len(self.stated)} numbers, which do not divide the {self.ranks} ranks along dp"
            return
        own = self._stated_shares()
        if is_final and sum(own) != number:
            block = self.ranks // len(self.stated)
            times = "" if block == 1 else f"; each of them is for {block} ranks"
            yield f"{text} gives {self.ranks} ranks {sum(own)} micro-batches, but the step has {number}{times}"
        size = self.neighbours
        for first in range(0, self.ranks, size):
            of_group = own[first : first + size]
            if len(set(of_group)) > 1:
                yield (
                    f"{text} gives {', '.join(map(str, of_group))} to ranks {first} to {first + size - 1} along dp, "
                    f"which exchange tokens ({self._sizes}) and need equal numbers"
                )
                break
        uneven = [share for share in own if share % self.at_once]
        if uneven:
            yield f"{text}: m6.training.overlap_micro_batches {self.at_once} does not divide {uneven[0]}"

    def _product(self) -> str:
        interleaved = f" x m6.training.overlap_micro_batches {self.at_once}" if self.at_once > 1 else ""
        return f"train_micro_batch_size_per_gpu {self.micro_batch_size} x {self.ranks} ranks{interleaved}"

    def _too_few(self, number: int) -> str:
        if self.unit == 1:
            return f"it makes {number} micro-batches of {self.micro_batch_size}, fewer than the {self.ranks} ranks"
        names = []
        if self.neighbours > 1:
            names.append(self._sizes if self.tensor_size == 1 else f"{self.neighbours} neighbours ({self._sizes})")
        if self.at_once > 1:
            names.append(f"overlap_micro_batches {self.at_once}")
        return (
            f"it makes {number} micro-batches of {self.micro_batch_size}; they come in {' x '.join(names)}"
            f"{'' if len(names) == 1 else f' = {self.unit}'}, and the {self.ranks} ranks need "
            f"{self.unit * self.groups} or more"
        )

    @property
    def _sizes(self) -> str:
        """The settings that make ``neighbours``."""
        groups = "" if self.tensor_size == 1 else f" with m6.parallel.tensor.num_ranks {self.tensor_size}"
        return f"m6.training.ep_size {self.ep_size}{groups}"

    def _remedy(self, key: str, samples: int) -> str:
        """The nearest settings that work: shares, a smaller micro-batch, or a batch."""
        without = replace(self, stated=None)
        found = []
        if self.stated is not None and not any(without.refusals(samples)):
            shares = self._nearest_shares(samples)
            if len(set(shares)) > 1 and not any(replace(self, stated=shares).refusals(samples)):
                found.append(f"set {KEY}={list(shares)}")
            found.append(f"leave it out for {', '.join(map(str, shortened(without.shares(samples))))} on each")
        else:
            smaller = (replace(without, micro_batch_size=size) for size in range(self.micro_batch_size - 1, 0, -1))
            fitting = next((each for each in smaller if not any(each.refusals(samples))), None)
            if fitting is not None and self.accumulation is None:
                found.append(f"try train_micro_batch_size_per_gpu {fitting.micro_batch_size}")
            batch = without.nearest_batch(samples)
            if batch is not None:
                found.append(f"{'' if found else 'try '}{key} {batch}")
        return ", or ".join(found) or "use fewer ranks"

    def _nearest_shares(self, samples: int) -> tuple[int, ...]:
        """Valid shares in proportion to the stated ones, as short as the key may be."""
        assert self.stated is not None
        wanted = self.stated
        if self.ranks % len(wanted):
            wanted = tuple(wanted[rank * len(wanted) // self.ranks] for rank in range(self.ranks))
        block = self.ranks // len(wanted)
        whole = [share for share in wanted for _ in range(block)]
        return shortened(self.in_proportion(samples, self._sums_of_groups(whole)))

    def nearest_batch(self, samples: int) -> int | None:
        """The nearest batch without a refusal, at equal distance the larger one; None if there is none near."""
        micro = self.micro_batch_size
        number = round(samples / micro)
        rounds = self.unit * self.groups * (1 if self.pipeline is None else 2 * self.pipeline.num_ranks)
        for distance in range(max(number, 0) + 2 * rounds + 1):
            for near in (number + distance, number - distance):
                if near > 0 and not any(self.refusals(near * micro)):
                    return near * micro
        return None

    def describe(self, samples: int) -> str:
        """The shares in words, with the part of the time of passes that ranks wait; empty if they are equal."""
        shares = self.shares(samples)
        if len(set(shares)) == 1:
            return ""
        runs = [f"{share} on {shares.count(share)}" for share in sorted(set(shares), reverse=True)]
        text = f"micro-batches of a step: {', '.join(runs)} of {self.ranks} ranks"
        if self.stated is not None:
            return text
        waiting = 1 - sum(shares) / (max(shares) * self.ranks)
        return f"{text}, which wait {waiting:.0%} of the passes on average; {KEY} divides them otherwise"


def shortened(shares: Sequence[int]) -> tuple[int, ...]:
    """The shortest list for ``m6.parallel.shares`` with these shares of all ranks."""
    ends = [rank for rank in range(1, len(shares)) if shares[rank] != shares[rank - 1]]
    return tuple(shares[:: math.gcd(len(shares), *ends)])
