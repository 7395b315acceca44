"""How long exchanges and computations take together, on a virtual clock: in the order of ``moe.overlap`` for the parts
of a layer, and for whole passes that take turns."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moe.overlap import steps


class Operation(NamedTuple):
    """What a rank does next.

    Attributes:
        kind: starts an exchange, waits for it, or computes: routed experts, what is computed beside the exchanges, or
            gradients that nothing in the backward pass waits for, such as those of the weights beside; the forward
            pass only notes their place.
        part: the part of the tokens, or the pass.
        hop: of an exchange, counted from 0 over the way there and the way back, in a pass over those of all layers;
            otherwise 0.
    """

    kind: Literal["start", "wait", "experts", "beside", "deferred"]
    part: int
    hop: int = 0


@dataclass(frozen=True)
class Span:
    """The time of one pass through a layer, without its router and the exchange of numbers, or of passes in turns.

    Attributes:
        total: seconds from the first start to the end of the last wait.
        compute: seconds of computation.
        network: seconds of the exchanges.
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
        yield from _mirrored(operations(num_parts, num_hops))
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


def turns(num_passes: int, num_layers: int, num_hops: int, backward: bool = False) -> Iterator[Operation]:
    """The same of passes through all layers: each goes on until its tokens are on their way, then the next one does.

    Exchanges inside of a node, which are the inner hops, do not interrupt a pass. What is computed "beside" is all of a
    layer but its experts, before its exchange. Its "deferred" gradients are computed when the gradients of its inputs
    are on their way to the experts of the layer before, immediately before that exchange is waited for. In the first
    layer, which has none before it, they come after the rest of the layer.
    """
    if backward:
        yield from _mirrored(turns(num_passes, num_layers, num_hops))
        return
    hops = 2 * num_hops
    for turn in range(2 * num_layers + 1):
        layer, is_way_back = divmod(turn, 2)
        first = layer * hops
        for number in range(num_passes):
            if is_way_back:
                for hop in range(first, first + hops - 1):
                    yield Operation("wait", number, hop)
                    if hop == first + num_hops - 1:
                        yield Operation("experts", number)
                    yield Operation("start", number, hop + 1)
                if layer < num_layers - 1:  # of the next layer
                    yield Operation("deferred", number)
                continue
            if layer > 0:
                yield Operation("wait", number, first - 1)
            else:
                yield Operation("deferred", number)
            if layer < num_layers:
                yield Operation("beside", number)
                yield Operation("start", number, first)


def _mirrored(forward: Iterable[Operation]) -> Iterator[Operation]:
    mirror: dict[str, Literal["start", "wait"]] = {"start": "wait", "wait": "start"}
    for operation in reversed(list(forward)):
        yield operation._replace(kind=mirror.get(operation.kind, operation.kind))


def span(
    there: Sequence[float],
    experts: float,
    back: Sequence[float],
    num_parts: int = 1,
    beside: float = 0.0,
    backward: bool = False,
    links: Sequence[int] | None = None,
) -> Span:
    """Runs a pass on a clock. A rank computes one thing at a time, and exchanges on one link follow each other as they
    started.

    Args:
        there: seconds of one part's exchanges towards the experts, one for each hop; in the backward pass those of the
            gradients that come back through these hops.
        experts: seconds in which the experts compute one part.
        back: seconds of the exchanges back, in their order; in the backward pass those of the gradients through them.
        num_parts: the number of equal parts.
        beside: seconds of what is computed for one part beside the exchanges, such as shared experts.
        backward: whether this is a backward pass.
        links: which link each hop towards the experts uses, such as the network and the wires inside of a node; the
            hops back use the same. None: all use one.
    """
    hops = _hops(there, back, links)
    now = _clock(operations(num_parts, len(there), backward), hops, experts, beside)
    return Span(now, num_parts * (experts + beside), num_parts * (sum(there) + sum(back)))


def span_of_turns(
    there: Sequence[float],
    experts: float,
    back: Sequence[float],
    num_passes: int,
    num_layers: int,
    beside: float,
    backward: bool = False,
    links: Sequence[int] | None = None,
    deferred: float = 0.0,
) -> Span:
    """The same of passes that take turns; seconds are those of one layer and pass.

    Args:
        deferred: seconds of ``beside`` for gradients that nothing waits for; 0 in the forward pass.

    Raises:
        ValueError: ``deferred`` is more than ``beside``.
    """
    if deferred > beside:
        raise ValueError(f"deferred is {deferred} of the {beside} seconds that are computed beside")
    hops = _hops(there, back, links)
    now = _clock(turns(num_passes, num_layers, len(there), backward), hops, experts, beside - deferred, deferred)
    times = num_passes * num_layers
    return Span(now, times * (experts + beside), times * (sum(there) + sum(back)))


def _hops(there: Sequence[float], back: Sequence[float], links: Sequence[int] | None) -> list[tuple[float, int]]:
    """The seconds and the link of each hop, there and back."""
    used = [0] * len(there) if links is None else [*links]
    return list(zip([*there, *back], [*used, *used[::-1]], strict=True))


def _clock(
    order: Iterable[Operation], hops: Sequence[tuple[float, int]], experts: float, beside: float, deferred: float = 0.0
) -> float:
    """The time at which a rank has ended all operations."""
    seconds, now = {"experts": experts, "beside": beside, "deferred": deferred}, 0.0
    free: dict[int, float] = {}
    ends: dict[tuple[int, int], float] = {}
    for kind, part, hop in order:
        if kind == "start":
            duration, link = hops[hop % len(hops)]
            ends[part, hop] = free[link] = max(now, free.get(link, 0.0)) + duration
        elif kind == "wait":
            now = max(now, ends[part, hop])
        else:
            now += seconds[kind]
    return now
