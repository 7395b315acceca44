"""Balances the experts' loads with biases of the routers instead of a loss."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor

if TYPE_CHECKING:
    from moe.layer import MoELayer
    from moe.routing import Router, RoutingStats


class BiasBalancer:
    """Updates the ``balance_bias`` of routers outside of the forward pass, so that loads become even.

    b_i <- b_i + rate * sign(mean_j c_j - c_i), where c_i counts how often expert i of a prototype was chosen since the
    last update, on all ranks: auxiliary loss free balancing (arXiv 2408.15664), algorithm 1.

    The caller passes the counts of the layers' outputs to ``add``. If activation checkpointing repeats a forward pass,
    the pass still counts once.

    Args:
        layers: in the order of the statistics given to ``add``; a layer used twice stands here twice.
        group: the ranks with these layers; None: all ranks.
    """

    def __init__(self, layers: Sequence["MoELayer"], group: torch.distributed.ProcessGroup | None = None) -> None:
        self.layers, self._group = layers, group
        self._counts: Tensor | None = None

    def add(self, stats: Iterable["RoutingStats"]) -> None:
        """Adds the counts of one forward pass; does not wait for the device."""
        chosen = [layer.chosen_counts for layer in stats]
        if not chosen:
            return
        counts = torch.cat(chosen)
        self._counts = counts if self._counts is None else self._counts + counts

    @torch.no_grad()
    def step(self) -> None:
        """Updates all biases with one all-reduce of the counts, and sets the counts to zero."""
        counts, self._counts = self._counts, None
        if counts is None:
            return
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts, group=self._group)
        totals: dict[Router, Tensor] = {}  # layers may share a router
        of_layers = counts.split([layer.config.num_experts for layer in self.layers])
        for layer, own in zip(self.layers, of_layers, strict=True):
            totals[layer.router] = totals[layer.router] + own if layer.router in totals else own
        for router, total in totals.items():
            bias, config = router.balance_bias, router.config
            if bias is not None:
                means = total.view(config.num_groups, config.num_prototypes, -1).mean((0, 2), keepdim=True)
                error = means - total.view(config.num_groups, config.num_prototypes, -1)
                bias += config.balance_bias_rate * error.sign().view(-1)

    def discard(self) -> None:
        """Sets the counts to zero without an update, for a skipped step."""
        self._counts = None
