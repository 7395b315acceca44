"""The layer as a loop over tokens: slow, obvious, and what the layer is compared with."""

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from moe.config import MoEConfig


class ReferenceOutput(NamedTuple):
    """hidden_states [T, D], aux_loss [], per expert the numbers of the tokens it computed, the rest per prototype."""

    hidden_states: Tensor
    aux_loss: Tensor
    tokens_of_expert: list[list[int]]
    dropped: list[int]
    router_entropy: list[float]


def reference_moe(
    hidden_states: Tensor,
    token_mask: Tensor,
    parameters: dict[str, Tensor],
    config: MoEConfig,
    training: bool = True,
) -> ReferenceOutput:
    """Computes ``MoELayer`` token by token, differentiable by autograd.

    Args:
        hidden_states: [T, D], best in float64.
        token_mask: bool [T].
        parameters: by their names in ``MoELayer``.
    """
    activation = {"gelu": torch.nn.functional.gelu, "relu": torch.relu}[config.activation]
    prototypes, size = config.num_prototypes, config.num_experts // config.num_prototypes
    real = [t for t in range(len(hidden_states)) if token_mask[t]]

    # Router: one softmax for every token and prototype.
    logits = {}
    probabilities = {}
    choices = {}
    entropy = [0.0] * prototypes
    for t in real:
        for z in range(prototypes):
            logits[t, z] = parameters["router.weight"][z * size : (z + 1) * size] @ hidden_states[t]
            probabilities[t, z] = logits[t, z].exp() / logits[t, z].exp().sum()
            ranked = sorted(range(size), key=lambda i, p=probabilities[t, z]: -p[i].item())  # type: ignore[misc]
            choices[t, z] = ranked[: config.top_k]
            entropy[z] -= sum(p * math.log(p) for p in probabilities[t, z].tolist())

    # Places: all first choices, then all second choices, in the order of tokens.
    factor = config.capacity_factor if training else config.eval_capacity_factor
    capacity = math.inf
    if factor is not None:
        counted = prototypes * config.top_k if config.capacity_rule == "k" else 1
        capacity = max(config.min_capacity, math.ceil(Fraction(str(factor)) * counted * len(real) / config.num_experts))
    tokens_of_expert: list[list[int]] = [[] for _ in range(config.num_experts)]
    chosen_counts = [0] * config.num_experts
    outputs = [torch.zeros_like(row) for row in hidden_states]
    dropped = [0] * prototypes
    for rank in range(config.top_k):
        for z in range(prototypes):
            for t in real:
                choice = choices[t, z][rank]
                expert = z * size + choice
                chosen_counts[expert] += 1
                if len(tokens_of_expert[expert]) >= capacity:
                    dropped[z] += 1
                    continue
                tokens_of_expert[expert].append(t)
                hidden = parameters["experts.w_in"][expert] @ hidden_states[t]
                hidden = activation(hidden)
                output = parameters["experts.w_out"][expert] @ hidden
                outputs[t] = outputs[t] + probabilities[t, z][choice] * output

    # Balancing losses: M * sum_i f_i P_i and the squared log-partition, over real tokens.
    balance = z_loss = hidden_states.new_zeros(())
    for z in range(prototypes):
        for i in range(size):
            for t in real:
                share = chosen_counts[z * size + i] / (len(real) * config.top_k)
                balance = balance + size * share * probabilities[t, z][i] / (len(real) * prototypes)
        for t in real:
            z_loss = z_loss + logits[t, z].exp().sum().log() ** 2 / (len(real) * prototypes)
    aux_loss = config.aux_loss_weight * balance + config.z_loss_weight * z_loss

    entropy = [total / max(len(real), 1) for total in entropy]
    return ReferenceOutput(torch.stack(outputs), aux_loss, tokens_of_expert, dropped, entropy)
