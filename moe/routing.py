"""Which experts compute which tokens, and what the choice costs."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe.config import MoEConfig


class RoutingStats(NamedTuple):
    """What happened to this rank's tokens, on their device and outside of autograd; all float32.

    Attributes:
        expert_counts: [E] tokens computed by each of the layer's experts.
        dropped: [Z] (token, expert) pairs that found their expert full, in each prototype.
        num_tokens: [] tokens that are no padding.
        router_entropy: [Z] nats, mean over tokens.
    """

    expert_counts: Tensor
    dropped: Tensor
    num_tokens: Tensor
    router_entropy: Tensor


class Routing(NamedTuple):
    """The R (token, expert) pairs to compute, sorted by expert.

    Attributes:
        tokens: [R] int64, index of the pair's token.
        gates: [R] float, factor of the expert's output.
        counts: [E] int64, pairs of each expert.
    """

    tokens: Tensor
    gates: Tensor
    counts: Tensor


class Router(nn.Module):
    """A linear map to one logit per expert, computed in at least float32 whatever the model's precision.

    bfloat16 logits tie and flip choices; Switch Transformer (arXiv 2101.03961), section 2.4.
    """

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """[T, D] -> logits [T, Z, M]."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = nn.functional.linear(tokens.to(dtype), self.weight.to(dtype))
        return logits.unflatten(-1, (self.config.num_prototypes, self.config.experts_per_prototype))


def route(logits: Tensor, config: MoEConfig, training: bool) -> tuple[Routing, Tensor, RoutingStats]:
    """Chooses ``top_k`` experts for every token inside each prototype.

    M6-T (arXiv 2105.15082), section 3: p = softmax over the M experts of a prototype, the gate of a chosen expert
    is its p as it is (not normalised over the choices), its number is z * M + choice.

    When an expert has a capacity, first choices of a prototype go before second choices and earlier tokens before
    later ones, as in GShard (arXiv 2006.16668), algorithm 1; what comes too late is dropped. The losses are taken
    over all choices, dropped or not.

    Args:
        logits: [T, Z, M] of the tokens that are no padding; T may be 0.

    Returns:
        The pairs to compute, the weighted sum of the balancing losses [], and the statistics.
    """
    num_tokens, num_prototypes, experts_per_prototype = logits.shape
    log_z = logits.logsumexp(-1)
    probabilities = logits.softmax(-1)
    gates, choices = probabilities.topk(config.top_k, dim=-1)
    first_expert = torch.arange(0, config.num_experts, experts_per_prototype, device=logits.device)
    experts = choices + first_expert[:, None]

    # Choice-major order: a stable sort by expert then yields each expert's pairs in their order of precedence.
    experts, order = experts.permute(2, 1, 0).reshape(-1).sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(config.num_experts, device=logits.device), right=True)
    chosen_counts = ends.diff(prepend=ends.new_zeros(1))

    capacity = config.capacity(num_tokens, training)
    counts = chosen_counts
    if capacity is not None:
        place = torch.arange(len(order), device=logits.device) - (ends - chosen_counts)[experts]
        order = order[place < capacity]
        counts = chosen_counts.clamp(max=capacity)
    routing = Routing(tokens=order % max(num_tokens, 1), gates=gates.permute(2, 1, 0).reshape(-1)[order], counts=counts)

    aux_loss = config.aux_loss_weight * load_balancing_loss(
        probabilities, chosen_counts.view(num_prototypes, experts_per_prototype)
    )
    if config.z_loss_weight:
        aux_loss = aux_loss + config.z_loss_weight * z_loss(log_z)

    with torch.no_grad():
        entropy = log_z - (probabilities * logits).sum(-1)
        stats = RoutingStats(
            expert_counts=counts.float(),
            dropped=(chosen_counts - counts).view(num_prototypes, -1).sum(1).float(),
            num_tokens=torch.full((), num_tokens, dtype=torch.float32, device=logits.device),
            router_entropy=(entropy.sum(0) / max(num_tokens, 1)).float(),
        )
    return routing, aux_loss, stats


def load_balancing_loss(probabilities: Tensor, chosen_counts: Tensor) -> Tensor:
    """mean over prototypes of M * sum_i f_i P_i, which is 1 when the load is even.

    f_i is the share of the prototype's choices that fell on expert i, a constant to autograd, and P_i the mean
    over tokens of its probability: Switch Transformer (arXiv 2101.03961), equation 4, in every prototype.

    Args:
        probabilities: [T, Z, M].
        chosen_counts: [Z, M], choices of every expert before any is dropped.
    """
    num_tokens, num_prototypes, experts_per_prototype = probabilities.shape
    counts = chosen_counts.to(probabilities.dtype)
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    mean_probabilities = probabilities.sum(0) / max(num_tokens, 1)
    return experts_per_prototype * (shares * mean_probabilities).sum() / num_prototypes


def z_loss(log_z: Tensor) -> Tensor:
    """mean over tokens and prototypes of logsumexp(logits)^2: ST-MoE (arXiv 2202.08906), equation 5."""
    return log_z.square().sum() / max(log_z.numel(), 1)
