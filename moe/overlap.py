"""The schedule of exchange and computation for the parts of a layer's tokens, and its dispatcher."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe.dispatch import Exchange, StagedForward
from moe.experts import Experts
from moe.routing import Routing, divide, part_sizes


def steps(num_parts: int, num_hops: int) -> Iterator[tuple[int, int | None]]:
    """Yields the schedule of every rank in order: (part, stage of its generator), see ``Exchange.staged_forward``.

    The stage None stands for the concurrent branch of a part, such as shared experts.

    A part starts immediately before the experts compute the part before it. Its first exchange is in flight during this
    computation. The combine of a part is in flight while the experts compute the next part. So the experts overlap with
    all exchanges, except the first part's dispatch, the last part's combine and, with node exchanges, the exchanges
    inside a node. The shared experts compute there: for the last part during its combine, for the others during their
    dispatch.

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
    """The dispatcher for experts on other ranks. It divides the tokens and overlaps the exchanges of the parts.

    All tokens are routed before the division, so outputs and gradients do not depend on the number of parts. Only the
    order of sums over rows, and so the rounding of gradients, depends on it.

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
        concurrent: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """See ``Dispatcher``."""
        parts, routings = [tokens], [routing]
        if self.num_parts > 1:
            parts = list(tokens.split(part_sizes(len(tokens), self.num_parts)))
            routings = divide(routing, len(tokens), self.num_parts)
        outputs: list[Tensor] = []
        added: dict[int, Tensor] = {}
        # All counts are exchanged first: behind rows on the same connection they would wait, and the host with them.
        passes = [self.exchange.staged_forward(*pair, experts) for pair in zip(parts, routings, strict=True)]
        runs = [_collect(staged, outputs) for staged in passes]
        for part, stage in steps(self.num_parts, self.exchange.num_hops):
            if stage is not None:
                next(runs[part], None)
            elif concurrent is not None:
                added[part] = concurrent(parts[part])
        results = [output + added[part] if added else output for part, output in enumerate(outputs)]
        return results[0] if self.num_parts == 1 else torch.cat(results)

    def staged_forward(self, tokens: Tensor, routing: Routing, experts: Experts) -> StagedForward:
        """See ``Dispatcher``. Needs one part, because the caller's own computation overlaps instead of other parts.

        It pauses only for the outermost exchange, in dispatch and combine. Exchanges inside a node are short, and
        computation during them would only delay the experts.

        Raises:
            ValueError: there are several parts.
        """
        if self.num_parts > 1:
            raise ValueError(f"a staged forward pass has no parts, but overlap_parts is {self.num_parts}; expected 1")
        staged, last = self.exchange.staged_forward(tokens, routing, experts), 2 * self.exchange.num_hops - 1
        for pause in range(last + 1):
            next(staged)
            if pause in (0, last):
                yield
        return (yield from staged)  # it pauses no more


def _collect(staged: StagedForward, outputs: list[Tensor]) -> Iterator[None]:
    """Runs a generator stage by stage and appends its value. Parts end in order."""
    outputs.append((yield from staged))
