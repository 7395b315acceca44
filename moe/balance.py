"""What keeps the experts' loads even: losses, and biases that need no loss."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor

if TYPE_CHECKING:
    from moe.layer import MoELayer
    from moe.routing import Router, RoutingStats


def load_balancing_loss(probabilities: Tensor, chosen_counts: Tensor, scope: str = "micro_batch") -> Tensor:
    """mean over prototypes of M * sum_i f_i P_i, which is 1 when the load is even.

    f_i is the share of the prototype's choices that fell on expert i, a constant to autograd, and P_i the mean
    over tokens of its probability: Switch Transformer (arXiv 2101.03961), equation 4, in every prototype.

    With scope "global_batch" f_i is taken over the tokens of all ranks (arXiv 2501.11873, section 3), and tokens weigh
    the same whichever rank has them: the mean of the ranks' losses is that of one rank with all tokens. One
    all-reduce of E + 1 numbers over all ranks of the default process group.

    Args:
        probabilities: [T, Z, M].
        chosen_counts: [Z, M], choices of every expert before any is dropped.
    """
    num_tokens, num_prototypes, experts_per_prototype = probabilities.shape
    counts = chosen_counts.to(probabilities.dtype)
    tokens_of_mean: float | Tensor = max(num_tokens, 1)
    if scope == "global_batch" and torch.distributed.is_initialized():
        sums = torch.cat([counts.reshape(-1), counts.new_full((1,), num_tokens)])
        torch.distributed.all_reduce(sums)
        counts = sums[:-1].view_as(counts)
        tokens_of_mean = sums[-1].clamp(min=1) / torch.distributed.get_world_size()
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    mean_probabilities = probabilities.sum(0) / tokens_of_mean
    return experts_per_prototype * (shares * mean_probabilities).sum() / num_prototypes


def z_loss(logits: Tensor) -> Tensor:
    """mean over tokens and prototypes of logsumexp(logits)^2: ST-MoE (arXiv 2202.08906), equation 5.

    Args:
        logits: [T, Z, M].
    """
    log_z = logits.logsumexp(-1)
    return log_z.square().sum() / max(log_z.numel(), 1)


class BiasBalancer:
    """Moves the routers' ``balance_bias`` towards an even load, outside of the forward pass.

    b_i <- b_i + rate * sign(mean_j c_j - c_i) with c the choices of each expert of a prototype since the last update,
    on all ranks: auxiliary loss free balancing (arXiv 2408.15664), algorithm 1. The counts come with the layers'
    outputs, once for each forward pass that counts, so that a recomputation under activation checkpointing does not.

    Args:
        layers: in the order of the statistics given to ``add``; a layer that is used twice stands here twice.
    """

    def __init__(self, layers: Sequence["MoELayer"]) -> None:
        self.layers = layers
        self._counts: Tensor | None = None

    def add(self, stats: Iterable["RoutingStats"]) -> None:
        """Counts one forward pass; without synchronisation."""
        counts = torch.stack([layer.chosen_counts for layer in stats])
        self._counts = counts if self._counts is None else self._counts + counts

    @torch.no_grad()
    def step(self) -> None:
        """Updates all biases from the counts of all ranks, with one all-reduce, and begins to count anew."""
        counts, self._counts = self._counts, None
        if counts is None:
            return
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        totals: dict[Router, Tensor] = {}  # layers may share a router
        for layer, own in zip(self.layers, counts, strict=True):
            totals[layer.router] = totals[layer.router] + own if layer.router in totals else own
        for router, total in totals.items():
            bias, config = router.balance_bias, router.config
            if bias is not None:
                loads = total.view(config.num_prototypes, config.experts_per_prototype)
                error = loads.mean(-1, keepdim=True) - loads
                bias += config.balance_bias_rate * error.sign().view(-1)

    def discard(self) -> None:
        """Forgets the counts of a step that was not applied."""
        self._counts = None
