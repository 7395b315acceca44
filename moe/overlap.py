"""The order in which the parts of a layer's tokens are exchanged and computed, and the dispatcher that follows it."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe.dispatch import Exchange, Trip
from moe.experts import Experts
from moe.routing import Routing, divide, part_sizes


def steps(num_parts: int, num_hops: int) -> Iterator[tuple[int, int | None]]:
    """Yields what every rank does, in this order: (part, stage of its trip), see ``Exchange.trip``.

    The stage None is what is computed beside the exchanges for the tokens of the part, such as shared experts.

    A part starts immediately before the experts compute the part before it, and its first exchange is then under way
    during that computation. What the experts have computed goes back while they compute the next part. So only the
    first part's way there and the last part's way back have no experts beside them, and between nodes the exchanges
    inside of a node. The shared experts compute there: for the last part on its way back, for the others on their way
    there.

    With one hop, two parts and E for the experts, from left to right::

        part 0   start         shared   wait E start                           wait
        part 1          start                          wait E start   shared         wait

    Autograd runs backwards, so the gradients are exchanged and computed in the mirrored order.
    """
    last_part, last_stage = num_parts - 1, 2 * num_hops
    for column in range(last_part * num_hops + last_stage + 1):
        for part in reversed(range(num_parts)):
            stage = column - part * num_hops
            if not 0 <= stage <= last_stage:
                continue
            if stage == 1 and part < last_part:
                yield part, None
            yield part, stage
            if stage == last_stage - 1 and part == last_part:
                yield part, None


class OverlappingDispatcher:
    """The dispatcher for experts on other ranks: it divides the tokens, so that one part is exchanged beside another.

    The choice of experts is made for all tokens before, so outputs and gradients do not depend on the number of parts,
    except that the sums of gradients over rows are rounded in another order.

    Args:
        exchange: brings the tokens to the experts.
        num_parts: the number of parts. A rank with fewer tokens has empty parts.
    """

    def __init__(self, exchange: Exchange, num_parts: int = 1) -> None:
        self.exchange, self.num_parts, self.traffic = exchange, num_parts, exchange.traffic

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        beside: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """See ``Dispatcher``."""
        parts, routings = [tokens], [routing]
        if self.num_parts > 1:
            parts = list(tokens.split(part_sizes(len(tokens), self.num_parts)))
            routings = divide(routing, len(tokens), self.num_parts)
        outputs: list[Tensor] = []
        added: dict[int, Tensor] = {}
        # All numbers are exchanged first: behind rows on the same connection they would wait, and the host for them.
        trips = [self.exchange.trip(*pair, experts) for pair in zip(parts, routings, strict=True)]
        runs = [_collect(trip, outputs) for trip in trips]
        for part, stage in steps(self.num_parts, self.exchange.num_hops):
            if stage is not None:
                next(runs[part], None)
            elif beside is not None:
                added[part] = beside(parts[part])
        results = [output + added[part] if added else output for part, output in enumerate(outputs)]
        return results[0] if self.num_parts == 1 else torch.cat(results)

    def trip(self, tokens: Tensor, routing: Routing, experts: Experts) -> Trip:
        """See ``Dispatcher``; for one part: what the caller computes meanwhile takes the place of other parts.

        It pauses for the outermost exchange alone, on the way there and back: those inside of a node are short, and a
        computation beside them would only keep the experts from what has arrived.
        """
        if self.num_parts > 1:
            raise ValueError(f"a trip has no parts, but overlap_parts is {self.num_parts}; expected 1")
        trip, last = self.exchange.trip(tokens, routing, experts), 2 * self.exchange.num_hops - 1
        for pause in range(last + 1):
            next(trip)
            if pause in (0, last):
                yield
        return (yield from trip)  # it pauses no more


def _collect(trip: Trip, outputs: list[Tensor]) -> Iterator[None]:
    """Runs a trip stage by stage and appends its value; parts end in their order."""
    outputs.append((yield from trip))
