"""What a capacity is expected to leave over of a call's choices, before any token is routed."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe.config import MoEConfig


class ExpectedRouting(NamedTuple):
    """What routed experts compute of the tokens of one call, in the mean.

    Attributes:
        experts_per_token: (token, expert) pairs that are computed, over the tokens; K if none is dropped.
        tokens_without_expert: share of the tokens without a computed pair, whose layer adds nothing but what shared
            experts compute.
    """

    experts_per_token: float
    tokens_without_expert: float


@lru_cache(maxsize=1024)
def expected_routing(config: MoEConfig, num_tokens: int, training: bool = True) -> ExpectedRouting:
    """Returns the expectation over routers with balanced probabilities, whose choices are random.

    Every token chooses each ``top_k`` different experts of a prototype with equal probability, independently of other
    tokens. The load of an expert is then binomial, with T trials of probability p = K / E, and an expert of capacity C
    computes E[min(load, C)] = p * sum over n < T of P(Bin(n, p) < C) pairs. That is exact for every configuration; a
    capacity that is rounded at random is averaged over.

    A token without an expert has lost all of its K pairs, which are taken to be lost independently of each other. In
    the drop order "position" a choice of rank r of the token number t is lost if C of the r (T - 1) + t choices before
    it are of the same expert. Early tokens keep all and late ones nothing, so a small capacity leaves more tokens
    without an expert than if all lost their pairs equally often, as they do in the order "probability". There the share
    is an upper estimate if the gates of a token depend on each other, so that it rarely loses all: with ``top_k`` above
    1, ``normalize_gates`` or "global_softmax". Choices within few groups depend on each other too, and leave a little
    more tokens without an expert. Tests bound the errors against ``route``.

    A router that is not balanced drops more.

    Args:
        num_tokens: T, without padding.
    """
    most, mean = config.capacity(num_tokens, training), config.mean_capacity(num_tokens, training)
    if most is None or mean is None or num_tokens == 0:
        return ExpectedRouting(float(config.experts_per_token), 0.0)
    # Rounded at random, C is ``most`` with this probability, and otherwise one less.
    share = 1 + mean - most

    def kept(trials: Tensor, probability: float) -> Tensor:
        """The probability that fewer than C of so many earlier choices are of the same expert."""
        below = _fewer(most, trials, probability)
        return below if share == 1 else share * below + (1 - share) * _fewer(most - 1, trials, probability)

    tokens = torch.arange(num_tokens)
    pairs = config.experts_per_token * kept(tokens, config.top_k / config.experts_per_prototype).mean().item()
    if config.drop_order == "probability":
        return ExpectedRouting(pairs, (1 - pairs / config.experts_per_token) ** config.experts_per_token)
    lost = torch.ones(num_tokens, dtype=torch.float64)
    for rank in range(config.top_k):
        lost *= 1 - kept(rank * (num_tokens - 1) + tokens, 1 / config.experts_per_prototype)
    return ExpectedRouting(pairs, (lost**config.num_prototypes).mean().item())


def _fewer(successes: int, trials: Tensor, probability: float) -> Tensor:
    """P(Bin(n, probability) < successes) for each n of ``trials``, int64 and ascending by 1.

    It is the probability that the last of so many successes comes after the n-th trial; the number of that trial has a
    negative binomial distribution.
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
