"""The layer as a loop over tokens: slow and obvious, for comparison with the layer."""

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from moe.config import MoEConfig


class ReferenceOutput(NamedTuple):
    """What the layer returns, and what its statistics are computed from.

    Attributes:
        hidden_states: [T, D].
        aux_loss: [].
        tokens_of_expert: for each expert the indices of the tokens that it computed.
        chosen_counts: for each expert how often it was chosen.
        dropped: for each prototype the number of dropped pairs.
        router_entropy: for each prototype the mean entropy.
    """

    hidden_states: Tensor
    aux_loss: Tensor
    tokens_of_expert: list[list[int]]
    chosen_counts: list[int]
    dropped: list[int]
    router_entropy: list[float]


def reference_moe(
    hidden_states: Tensor,
    token_mask: Tensor,
    parameters: dict[str, Tensor],
    config: MoEConfig,
    training: bool = True,
) -> ReferenceOutput:
    """Computes what ``MoELayer`` does, without jitter and dropout, token by token; autograd can differentiate it.

    Args:
        hidden_states: [T, D], preferably in float64.
        token_mask: bool [T], False at padding.
        parameters: the parameters and the buffer ``router.balance_bias`` by their names in ``MoELayer``.
    """
    prototypes, size = config.num_prototypes, config.num_experts // config.num_prototypes
    real = [t for t in range(len(hidden_states)) if token_mask[t]]
    logits = {
        (t, z): parameters["router.weight"][z * size : (z + 1) * size] @ hidden_states[t]
        for t in real
        for z in range(prototypes)
    }
    scores = {}
    distribution = {}
    entropy = [0.0] * prototypes
    for t in real:
        everything = torch.cat([logits[t, z].exp() for z in range(prototypes)]).sum()
        for z in range(prototypes):
            exponentials = logits[t, z].exp()
            scores[t, z] = {
                "softmax": exponentials / exponentials.sum(),
                "global_softmax": exponentials / everything,
                "sigmoid": 1 / (1 + 1 / exponentials),
            }[config.gating]
            distribution[t, z] = scores[t, z] / scores[t, z].sum()
            entropy[z] -= sum(p * math.log(p) for p in distribution[t, z].tolist() if p > 0)
    factor = config.capacity_factor if training else config.eval_capacity_factor
    capacity: float = math.inf
    if factor is not None:
        counted = prototypes * config.top_k if config.capacity_rule == "k" else 1
        capacity = max(config.min_capacity, math.ceil(Fraction(str(factor)) * counted * len(real) / config.num_experts))

    # Gates of all choices: (token, expert) -> gate, in the order in which they fill the experts' capacity.
    gates: dict[tuple[int, int], Tensor] = {}
    bias = parameters.get("router.balance_bias", hidden_states.new_zeros(config.num_experts))
    ranked = {}
    for t in real:
        for z in range(prototypes):
            biased = (scores[t, z] + bias[z * size : (z + 1) * size]).tolist()
            ranked[t, z] = sorted(range(size), key=lambda i, b=biased: -b[i])[: config.top_k]  # type: ignore[misc]
    for rank in range(config.top_k):
        for z in range(prototypes):
            for t in real:
                choice = ranked[t, z][rank]
                gates[t, z * size + choice] = scores[t, z][choice]
    if config.normalize_gates:
        sums = {t: torch.stack([gate for (token, _), gate in gates.items() if token == t]).sum() for t in real}
        gates = {(t, expert): gate / sums[t] for (t, expert), gate in gates.items()}
    if config.drop_order == "probability":
        gates = dict(sorted(gates.items(), key=lambda item: -item[1].item()))

    tokens_of_expert: list[list[int]] = [[] for _ in range(config.num_experts)]
    chosen_counts = [0] * config.num_experts
    outputs = [torch.zeros_like(row) for row in hidden_states]
    dropped = [0] * prototypes
    for (t, expert), gate in gates.items():
        chosen_counts[expert] += 1
        if len(tokens_of_expert[expert]) >= capacity:
            dropped[expert // size] += 1
        else:
            tokens_of_expert[expert].append(t)
            own = {
                name.removeprefix("experts."): value[expert]
                for name, value in parameters.items()
                if name.startswith("experts.")
            }
            outputs[t] = outputs[t] + gate * _expert(hidden_states[t], own, config.activation)
    if config.num_shared_experts:
        own = {name.removeprefix("shared."): value for name, value in parameters.items() if name.startswith("shared.")}
        for t in real:
            output = _expert(hidden_states[t], own, config.activation)
            if config.shared_expert_gate:
                output = output / (1 + torch.exp(-(own["w_gate"][0] @ hidden_states[t])))
            outputs[t] = outputs[t] + output

    # The auxiliary losses, over tokens that are no padding: M * sum_i f_i P_i, and the squared logsumexp.
    balance = z_loss = hidden_states.new_zeros(())
    for z in range(prototypes):
        chosen = max(sum(chosen_counts[z * size : (z + 1) * size]), 1)
        for i in range(size):
            for t in real:
                share = chosen_counts[z * size + i] / chosen
                balance = balance + size * share * distribution[t, z][i] / (len(real) * prototypes)
        for t in real:
            z_loss = z_loss + logits[t, z].exp().sum().log() ** 2 / (len(real) * prototypes)
    aux_loss = config.aux_loss_weight * balance + config.z_loss_weight * z_loss

    entropy = [total / max(len(real), 1) for total in entropy]
    return ReferenceOutput(torch.stack(outputs), aux_loss, tokens_of_expert, chosen_counts, dropped, entropy)


def _expert(token: Tensor, weights: dict[str, Tensor], activation: str) -> Tensor:
    hidden = weights["w_in"] @ token
    if "b_in" in weights:
        hidden = hidden + weights["b_in"]
    if activation == "swiglu":
        gate, value = hidden.chunk(2)
        hidden = gate / (1 + torch.exp(-gate)) * value
    else:
        hidden = torch.nn.functional.gelu(hidden) if activation == "gelu" else hidden.relu()
    output = weights["w_out"] @ hidden
    return output + weights["b_out"] if "b_out" in weights else output
