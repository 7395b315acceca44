"""How long the exchanges and computations of a layer take together: the order of ``moe.overlap`` on a virtual clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moe.overlap import steps


class Operation(NamedTuple):
    """What a rank does next.

    Attributes:
        kind: starts an exchange, waits for it, or computes: routed experts, or what is computed beside the exchanges.
        part: the part of the tokens.
        hop: of an exchange, counted from 0 over the way there and the way back; otherwise 0.
    """

    kind: Literal["start", "wait", "experts", "beside"]
    part: int
    hop: int = 0


@dataclass(frozen=True)
class Span:
    """The time of one pass through a layer, without its router and the exchange of numbers.

    Attributes:
        total: seconds from the first start to the end of the last wait.
        compute: seconds of computation.
        network: seconds in which an exchange is under way.
    """

    total: float
    compute: float
    network: float

    @property
    def exposed(self) -> float:
        """Seconds in which the computation waits for an exchange."""
        return self.total - self.compute

    @property
    def hidden(self) -> float:
        """Seconds of exchanges beside computation."""
        return max(0.0, self.network - self.exposed)  # rounding may leave less than nothing


def operations(num_parts: int, num_hops: int, backward: bool = False) -> Iterator[Operation]:
    """Yields the operations of a forward pass in their order, or of a backward pass, which is mirrored."""
    if backward:
        mirror: dict[str, Literal["start", "wait"]] = {"start": "wait", "wait": "start"}
        for operation in reversed(list(operations(num_parts, num_hops))):
            yield operation._replace(kind=mirror.get(operation.kind, operation.kind))
        return
    for part, stage in steps(num_parts, num_hops):
        if stage is None:
            yield Operation("beside", part)
            continue
        if stage > 0:
            yield Operation("wait", part, stage - 1)
        if stage == num_hops:
            yield Operation("experts", part)
        if stage < 2 * num_hops:
            yield Operation("start", part, stage)


def span(
    there: Sequence[float],
    experts: float,
    back: Sequence[float],
    num_parts: int = 1,
    beside: float = 0.0,
    backward: bool = False,
) -> Span:
    """Runs a pass on a clock. A rank computes one thing at a time, and its exchanges follow each other as they started.

    Args:
        there: seconds of one part's exchanges towards the experts, one for each hop; in the backward pass those of the
            gradients that come back through these hops.
        experts: seconds in which the experts compute one part.
        back: seconds of the exchanges back, in their order; in the backward pass those of the gradients through them.
        num_parts: the number of equal parts.
        beside: seconds of what is computed for one part beside the exchanges, such as shared experts.
        backward: whether this is a backward pass.
    """
    hops, seconds = [*there, *back], {"experts": experts, "beside": beside}
    now = network_free = 0.0
    ends: dict[tuple[int, int], float] = {}
    for kind, part, hop in operations(num_parts, len(there), backward):
        if kind == "start":
            ends[part, hop] = network_free = max(now, network_free) + hops[hop]
        elif kind == "wait":
            now = max(now, ends[part, hop])
        else:
            now += seconds[kind]
    return Span(now, num_parts * (experts + beside), num_parts * sum(hops))
