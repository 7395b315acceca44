"""The expected effect of a capacity: the share of choices kept, before any token is routed."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe.config import MoEConfig


class ExpectedRouting(NamedTuple):
    """Expected routing of the tokens of one call.

    Attributes:
        experts_per_token: computed (token, expert) pairs divided by tokens; K if none is dropped.
        tokens_without_expert: share of the tokens without a computed pair. For these the layer adds only the output of
            shared experts.
    """

    experts_per_token: float
    tokens_without_expert: float


@lru_cache(maxsize=1024)
def expected_routing(config: MoEConfig, num_tokens: int, training: bool = True) -> ExpectedRouting:
    """Returns the expectation over balanced routers with random choices.

    Every token chooses each ``top_k`` different experts of a prototype with equal probability, independently of other
    tokens. The load of an expert is then binomial, with T trials of probability p = K / E, and an expert of capacity C
    computes E[min(load, C)] = p * sum over n < T of P(Bin(n, p) < C) pairs. This is exact for every configuration. For
    a randomly rounded capacity the result is the average over the rounding.

    A token without an expert has lost all of its K pairs. The losses are assumed to be independent. In the drop order
    "position", the rank-r choice of token t is lost if C of the r (T - 1) + t choices before it are of the same expert.
    Early tokens then keep all pairs and late ones none. A small capacity therefore leaves more tokens without an expert
    than in the order "probability", where all tokens lose pairs equally often. In the order "causal" a choice is lost
    if C of the t tokens before it chose the expert; with several rows t counts place by place. In the order
    "probability" the share is an upper estimate if a token's gates depend on each other: with ``top_k`` above 1,
    ``normalize_gates`` or "global_softmax" a token rarely loses all pairs. Choices within few groups depend on each
    other too, and leave slightly more tokens without an expert. Tests bound the errors against ``route``.

    An unbalanced router drops more.

    Args:
        num_tokens: T, without padding.
    """
    most, mean = config.capacity(num_tokens, training), config.mean_capacity(num_tokens, training)
    if most is None or mean is None or num_tokens == 0:
        return ExpectedRouting(float(config.experts_per_token), 0.0)
    # Rounded at random, C is ``most`` with this probability, and otherwise one less.
    share = 1 + mean - most

    def kept(trials: Tensor, probability: float) -> Tensor:
        """Returns the probability of fewer than C choices of the same expert among ``trials`` earlier choices."""
        below = _fewer(most, trials, probability)
        return below if share == 1 else share * below + (1 - share) * _fewer(most - 1, trials, probability)

    tokens = torch.arange(num_tokens)
    pairs = config.experts_per_token * kept(tokens, config.top_k / config.experts_per_prototype).mean().item()
    if config.drop_order == "probability":
        return ExpectedRouting(pairs, (1 - pairs / config.experts_per_token) ** config.experts_per_token)
    if config.drop_order == "causal":
        lost = (1 - kept(tokens, config.top_k / config.experts_per_prototype)) ** config.experts_per_token
        return ExpectedRouting(pairs, lost.mean().item())
    lost = torch.ones(num_tokens, dtype=torch.float64)
    for rank in range(config.top_k):
        lost *= 1 - kept(rank * (num_tokens - 1) + tokens, 1 / config.experts_per_prototype)
    return ExpectedRouting(pairs, (lost**config.num_prototypes).mean().item())


def _fewer(successes: int, trials: Tensor, probability: float) -> Tensor:
    """Returns P(Bin(n, probability) < successes) for each n of ``trials``, int64 and ascending by 1.

    This equals the probability of the last success coming after the n-th trial. The trial number of the last success
    has a negative binomial distribution.
    """
    if successes <= 0:
        return torch.zeros(len(trials), dtype=torch.float64)
    if probability == 1:
        return (trials < successes).double()
    last = torch.arange(1, int(trials[-1]) + 1, dtype=torch.float64)
    failures = last - successes
    ways = torch.lgamma(last) - torch.lgamma(torch.tensor(float(successes), dtype=torch.float64))
    ways = ways - torch.lgamma(failures.clamp_min(0) + 1)
    chance = torch.tensor(probability, dtype=torch.float64)
    logarithm = ways + successes * chance.log() + failures * torch.log1p(-chance)
    is_last = torch.where(failures < 0, 0.0, logarithm.exp())
    after = 1 - torch.cat([is_last.new_zeros(1), is_last.cumsum(0)])
    return after[trials].clamp(0, 1)
