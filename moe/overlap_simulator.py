"""A simulator of the overlap between exchanges and computation, on a virtual clock.

It runs the schedule of ``moe.overlap`` for the parts of a layer, or interleaved passes through all layers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moe.overlap import steps


class Operation(NamedTuple):
    """One operation of a rank.

    Attributes:
        kind: "start" starts an exchange and "wait" waits for it. "experts" computes routed experts and "concurrent" the
            concurrent branch. "deferred" computes deferred weight gradients; in the forward pass it only marks their
            position.
        part: the part of the tokens, or the pass.
        hop: the number of an exchange, counted from 0 over dispatch and combine (in an interleaved pass over all
            layers); otherwise 0.
    """

    kind: Literal["start", "wait", "experts", "concurrent", "deferred"]
    part: int
    hop: int = 0


@dataclass(frozen=True)
class Span:
    """The time of one pass through a layer, or of interleaved passes, without the router and the exchange of counts.

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
        """Seconds of computation stalled by exchanges."""
        return self.total - self.compute

    @property
    def hidden(self) -> float:
        """Seconds of exchanges overlapped with computation."""
        return max(0.0, self.network - self.exposed)  # rounding may leave less than nothing


def operations(num_parts: int, num_hops: int, backward: bool = False) -> Iterator[Operation]:
    """Yields the operations of a forward pass in order, or of a backward pass: the mirrored forward pass."""
    if backward:
        yield from _mirrored(operations(num_parts, num_hops))
        return
    for part, stage in steps(num_parts, num_hops):
        if stage is None:
            yield Operation("concurrent", part)
            continue
        if stage > 0:
            yield Operation("wait", part, stage - 1)
        if stage == num_hops:
            yield Operation("experts", part)
        if stage < 2 * num_hops:
            yield Operation("start", part, stage)


def interleaved_operations(
    num_passes: int, num_layers: int, num_hops: int, backward: bool = False
) -> Iterator[Operation]:
    """Yields the operations of interleaved passes through all layers. A pass runs until its tokens are in flight, then
    the next pass runs.

    The inner hops (exchanges inside a node) do not interrupt a pass. "concurrent" stands for all computation of a layer
    except its experts; it comes before the layer's exchange. A layer's "deferred" gradients are computed while the
    gradients of its inputs are in flight to the experts of the previous layer, immediately before the wait for this
    exchange. In the first layer they come after the rest of the layer.
    """
    if backward:
        yield from _mirrored(interleaved_operations(num_passes, num_layers, num_hops))
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
                yield Operation("concurrent", number)
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
    concurrent: float = 0.0,
    backward: bool = False,
    links: Sequence[int] | None = None,
) -> Span:
    """Simulates a pass. A rank runs one computation at a time, and exchanges on a link run in the order of their start.

    Args:
        there: seconds of one part's dispatch exchanges, one for each hop; in the backward pass seconds of the gradients
            through the same hops.
        experts: seconds of the experts for one part.
        back: seconds of one part's combine exchanges, in order; in the backward pass of the gradients through them.
        num_parts: the number of equal parts.
        concurrent: seconds of the concurrent branch of one part, such as shared experts.
        backward: whether this is a backward pass.
        links: the number of each dispatch hop's link, such as the network between nodes or the links inside a node; the
            combine uses the same links. None: all hops share one link.
    """
    hops = _hops(there, back, links)
    now = _clock(operations(num_parts, len(there), backward), hops, experts, concurrent)
    return Span(now, num_parts * (experts + concurrent), num_parts * (sum(there) + sum(back)))


def interleaved_span(
    there: Sequence[float],
    experts: float,
    back: Sequence[float],
    num_passes: int,
    num_layers: int,
    concurrent: float,
    backward: bool = False,
    links: Sequence[int] | None = None,
    deferred: float = 0.0,
) -> Span:
    """Simulates interleaved passes. Seconds are of one layer and pass; the other arguments are as for ``span``.

    Args:
        deferred: the part of ``concurrent`` for deferred weight gradients; 0 in the forward pass.

    Raises:
        ValueError: ``deferred`` is more than ``concurrent``.
    """
    if deferred > concurrent:
        raise ValueError(f"deferred is {deferred} of the {concurrent} seconds of concurrent computation")
    hops = _hops(there, back, links)
    now = _clock(
        interleaved_operations(num_passes, num_layers, len(there), backward),
        hops,
        experts,
        concurrent - deferred,
        deferred,
    )
    times = num_passes * num_layers
    return Span(now, times * (experts + concurrent), times * (sum(there) + sum(back)))


def _hops(there: Sequence[float], back: Sequence[float], links: Sequence[int] | None) -> list[tuple[float, int]]:
    """Returns the seconds and the link of each hop, of dispatch and combine."""
    used = [0] * len(there) if links is None else [*links]
    return list(zip([*there, *back], [*used, *used[::-1]], strict=True))


def _clock(
    order: Iterable[Operation],
    hops: Sequence[tuple[float, int]],
    experts: float,
    concurrent: float,
    deferred: float = 0.0,
) -> float:
    """Returns the end of all operations of a rank, in seconds from the start."""
    seconds, now = {"experts": experts, "concurrent": concurrent, "deferred": deferred}, 0.0
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
