"""The router: choice of experts, gates, capacity, and routing statistics."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe.autograd import without_autocast
from moe.config import MoEConfig
from moe.deferred_gradients import DeferredGradient, DeferredGradients, placeholder
from moe.groups import best_groups, gather_groups, to_global_ids, view_prototypes
from moe.losses import Sequences, load_balancing_losses, z_losses
from moe.parts import SequenceSlice, load_balancing_loss_of_part


class RoutingStats(NamedTuple):
    """Routing statistics of this rank's tokens: float32, on the tokens' device, without gradients.

    Attributes:
        expert_counts: [E] the number of tokens computed by each expert of the layer.
        dropped: [Z] the number of (token, expert) pairs of each prototype dropped because the expert was full.
        num_tokens: [] the number of tokens without padding.
        router_entropy: [Z] mean over tokens of the entropy of the probabilities, in nats; NaN if a logit is not finite.
        chosen_counts: [E] the number of choices of each expert, including dropped pairs.
        without_expert: [] the number of tokens without a computed pair: all their pairs were dropped.
        gate_sum: [] the sum of the gates of all computed pairs.
    """

    expert_counts: Tensor
    dropped: Tensor
    num_tokens: Tensor
    router_entropy: Tensor
    chosen_counts: Tensor
    without_expert: Tensor
    gate_sum: Tensor


class RouterLosses(NamedTuple):
    """The weighted auxiliary losses of a call.

    Attributes:
        mean: [] over the call's tokens; for a part of the tokens, its summand of the mean over all tokens.
        of_tokens: [T] the loss of each token; ``mean`` is their mean. None for a part of the tokens.
    """

    mean: Tensor
    of_tokens: Tensor | None


class Routing(NamedTuple):
    """The R (token, expert) pairs to compute, sorted by expert.

    Attributes:
        tokens: [R] int64, the index of each pair's token.
        gates: [R] float, the factor of each expert output.
        counts: [E] int64, the number of pairs of each expert.
        by_token: the indices of the pairs sorted by token [R] int64, and the start of each token's pairs in this order
            [T] int64; None if another sort would be needed. If not None, every token has equally many pairs.
    """

    tokens: Tensor
    gates: Tensor
    counts: Tensor
    by_token: tuple[Tensor, Tensor] | None = None


class Router(nn.Module):
    """A linear map to one logit per expert, computed in at least float32 whatever the model's precision.

    In bfloat16, logits become equal and choices change: Switch Transformer (arXiv 2101.03961), section 2.4. As in that
    paper, the inputs are multiplied by uniform noise in [1 - jitter, 1 + jitter] in training.

    The parameter is ``weight`` [E, D]. If ``config.balance_bias_rate`` is positive there is a buffer ``balance_bias``
    [E]. A conversion of the model leaves it in float32: its steps are smaller than the spacing of 16-bit numbers.
    """

    balance_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, device=device, dtype=dtype))
        bias = None
        if config.balance_bias_rate:
            bias = torch.zeros(config.num_experts, device=device, dtype=torch.float32)
        self.register_buffer("balance_bias", bias)
        self.deferred = DeferredGradients()

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the logits [T, Z, M] of tokens [T, D]."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        noise, jitter = None, self.config.router_jitter if self.training else 0.0
        if jitter:
            noise = torch.empty_like(tokens, dtype=dtype).uniform_(1 - jitter, 1 + jitter)
        weight, deferred = self.deferred.take(self.weight)
        with without_autocast(tokens):
            logits = Fp32RouterLinear.apply(tokens, weight, noise, dtype, deferred)
        return view_prototypes(logits, self.config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        # nn.Module converts buffers with the parameters. Keep the float32 buffer, but on the new device.
        bias = self.balance_bias
        super()._apply(fn, recurse)
        if bias is not None and self.balance_bias is not None and self.balance_bias.dtype != bias.dtype:
            self.balance_bias = bias.to(self.balance_bias.device)
        return self


def route(
    logits: Tensor,
    config: MoEConfig,
    training: bool,
    balance_bias: Tensor | None = None,
    part: SequenceSlice | None = None,
    sequences: Sequences | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    places: Tensor | None = None,
) -> tuple[Routing, RouterLosses, RoutingStats]:
    """Chooses experts for every token in each prototype. Each step is one of the functions below.

    Args:
        logits: [T, Z, M] of the tokens without padding; T may be 0.
        balance_bias: [E], see ``choose``.
        part: the position of these tokens among all tokens of losses and capacities; None: these are all tokens.
        sequences: of the tokens, for ``balance_scope`` "sequence".
        group: the ranks of ``balance_scope`` "global_batch"; None: all.
        places: see ``sort_by_expert``.

    Returns:
        The pairs to compute, the weighted auxiliary losses, and the statistics.
    """
    num_tokens = len(logits)
    scores = gating_scores(logits, config)
    # The losses need probabilities with the sum 1 in each prototype; only "softmax" scores are such. Other scores are
    # normalised as logarithms, because all scores of a prototype may be 0 in float32.
    distribution = scores if config.gating == "softmax" else log_scores(logits, config).softmax(-1)
    gates, experts = choose(logits, scores, config, balance_bias)
    routing, chosen_counts = sort_by_expert(gates, experts, config, training, places, part)

    of_tokens, of_part = logits.new_zeros(num_tokens), logits.new_zeros(())
    if config.aux_loss_weight:
        counts = chosen_counts if sequences is None else _counts_by_sequence(experts, sequences, config)
        choices = view_prototypes(counts, config)
        if part is None:
            balance = load_balancing_losses(distribution, choices, config.balance_scope, sequences, group)
            of_tokens = config.aux_loss_weight * balance
        else:
            scope = config.balance_scope
            balance = load_balancing_loss_of_part(distribution, choices, part, scope, sequences, group)
            of_part = config.aux_loss_weight * balance
    if config.z_loss_weight:
        of_tokens = of_tokens + config.z_loss_weight * z_losses(logits)
    whole = num_tokens if part is None else part.whole.num_tokens
    losses = RouterLosses(of_part + of_tokens.sum() / max(whole, 1), of_tokens if part is None else None)

    with torch.no_grad():
        # 0 * logit is NaN for a NaN or infinite logit: the statistics then show it, without a wait for the device.
        entropy = torch.special.entr(distribution).sum((0, 2)) / max(num_tokens, 1) + 0 * logits.sum((0, 2))
        stats = RoutingStats(
            expert_counts=routing.counts.float(),
            dropped=view_prototypes(chosen_counts - routing.counts, config).sum(1).float(),
            num_tokens=torch.full((), num_tokens, dtype=torch.float32, device=logits.device),
            router_entropy=entropy.float(),
            chosen_counts=chosen_counts.float(),
            # index_fill on the device does not make the host wait.
            without_expert=scores.new_ones(num_tokens).index_fill(0, routing.tokens, 0).sum().float(),
            gate_sum=routing.gates.sum().float(),
        )
    return routing, losses, stats


def gating_scores(logits: Tensor, config: MoEConfig) -> Tensor:
    """Computes the scores [T, Z, M] from logits [T, Z, M]; the gates are the scores of the chosen experts.

    "softmax" is exp(l^z_i) / sum_j exp(l^z_j) in each prototype z: M6-T (arXiv 2105.15082), section 3.
    "global_softmax" sums over the experts of all prototypes.
    "sigmoid" is 1 / (1 + exp(-l)): DeepSeek-V3 (arXiv 2412.19437), equation 15.
    """
    if config.gating == "sigmoid":
        return logits.sigmoid()
    if config.gating == "global_softmax":
        return logits.flatten(1).softmax(-1).view_as(logits)
    return logits.softmax(-1)


def log_scores(logits: Tensor, config: MoEConfig) -> Tensor:
    """Computes the logarithms of ``gating_scores``. They are finite even if a score underflows to 0."""
    if config.gating == "sigmoid":
        # Not logsigmoid: its gradient asks a compiler for the number of tokens. Above 40, log(1 + e^x) is x.
        return -nn.functional.softplus(-logits, threshold=40)
    if config.gating == "global_softmax":
        return logits.flatten(1).log_softmax(-1).view_as(logits)
    return logits.log_softmax(-1)


def choose(logits: Tensor, scores: Tensor, config: MoEConfig, balance_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Chooses the ``top_k`` experts of each prototype for every token.

    With groups, only experts of the token's best groups can be chosen. The bias is added to the scores for the choice
    only; the gates are the scores without the bias: auxiliary loss free balancing (arXiv 2408.15664), equation 3.
    ``normalize_gates`` divides the gates by their sum over the token's K choices (GShard, arXiv 2006.16668,
    algorithm 1; DeepSeek-V3, equation 13).

    Args:
        logits: [T, Z, M]; within a prototype they have the same order as the scores, with fewer ties.
        scores: [T, Z, M], the ``gating_scores`` of the logits.
        balance_bias: [E] or None.

    Returns:
        The gates and the experts' numbers in the whole layer, [T, Z, top_k] each, in descending order of the score.
    """
    with torch.no_grad():
        biased = logits if balance_bias is None else scores + view_prototypes(balance_bias, config)
        groups = None
        if config.groups_per_token < config.num_groups:
            groups = best_groups(scores if balance_bias is None else biased, config)
            biased = gather_groups(biased, groups, config)
        # max is one pass; topk sorts.
        choices = biased.max(-1, keepdim=True).indices if config.top_k == 1 else biased.topk(config.top_k).indices
        if groups is not None:
            choices = to_global_ids(choices, groups, config)
    if config.normalize_gates:
        gates = log_scores(logits, config).gather(-1, choices).flatten(1).softmax(-1).view_as(choices)
    else:
        gates = scores.gather(-1, choices)
    numbers = view_prototypes(torch.arange(config.num_experts, device=scores.device), config)
    return gates, numbers.expand_as(scores).gather(-1, choices)


def sort_by_expert(
    gates: Tensor,
    experts: Tensor,
    config: MoEConfig,
    training: bool,
    places: Tensor | None = None,
    part: SequenceSlice | None = None,
) -> tuple[Routing, Tensor]:
    """Sorts the choices by expert, and drops those beyond an expert's capacity.

    The drop order "position" keeps first choices before second ones and earlier tokens before later ones, as in GShard
    (arXiv 2006.16668), algorithm 1. "probability" keeps larger gates first: V-MoE (arXiv 2106.05974), section 4.
    "causal" keeps earlier places first, then first choices before second ones, then earlier rows. Parts of all rows in
    turn then drop the same pairs as all tokens at once. With "position" they do for one row and ``top_k`` 1.

    Args:
        gates, experts: [T, Z, top_k].
        places: [T] int64, of the tokens in their rows, for the order "causal"; None: all tokens are one row.
        part: the position of these tokens among the tokens of the capacity; None: these are all tokens.

    Returns:
        The pairs, and how often each expert was chosen before any pair was dropped [E].
    """
    num_tokens = len(gates)
    choices = gates.shape[1:].numel()
    capacity = capacities(config, num_tokens if part is None else part.whole.num_tokens, training, experts.device)
    if capacity is None:
        # Pairs are token-major before this stable sort, so its inverse permutation sorts them by token again. This
        # saves a second sort, and gives sums by token a fixed order.
        sorted_experts, order = experts.reshape(-1).sort(stable=True)
        ends = _ends(sorted_experts, config.num_experts)
        counts = ends.diff(prepend=ends.new_zeros(1))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        offsets = torch.arange(0, len(order), choices, device=order.device)
        tokens = order // choices
        return Routing(tokens, gates.reshape(-1).index_select(0, order), counts, (places, offsets)), counts

    # Choices vary slowest here, so a stable sort by expert leaves each expert's pairs in their order of precedence.
    experts, gates = experts.permute(2, 1, 0).reshape(-1), gates.permute(2, 1, 0).reshape(-1)
    precedence = torch.arange(len(gates), device=gates.device)
    if config.drop_order == "probability":
        precedence = gates.detach().argsort(descending=True, stable=True)
    elif config.drop_order == "causal":
        places = torch.arange(num_tokens, device=gates.device) if places is None else places
        ranks = torch.arange(config.top_k, device=gates.device)[:, None, None]
        keys = (places * config.top_k + ranks).expand(-1, config.num_prototypes, -1)
        precedence = keys.reshape(-1).argsort(stable=True)
    sorted_experts, order = experts[precedence].sort(stable=True)
    ends = _ends(sorted_experts, config.num_experts)
    chosen_counts = ends.diff(prepend=ends.new_zeros(1))
    if part is not None:
        capacity = part.whole.free_places(part.number, chosen_counts, capacity)
    place = torch.arange(len(order), device=order.device) - (ends - chosen_counts)[sorted_experts]
    order = precedence[order][place < capacity[sorted_experts]]
    return Routing(order % max(num_tokens, 1), gates[order], chosen_counts.minimum(capacity)), chosen_counts


def _counts_by_sequence(experts: Tensor, sequences: Sequences, config: MoEConfig) -> Tensor:
    """Counts the choices [T, Z, top_k] of each sequence, [G, E], including dropped choices."""
    places = (sequences.numbers[:, None] * config.num_experts + experts.flatten(1)).reshape(-1)
    counts = places.new_zeros(sequences.total * config.num_experts)
    return counts.index_add(0, places, torch.ones_like(places)).view(sequences.total, config.num_experts)


def capacities(config: MoEConfig, num_tokens: int, training: bool, device: torch.device) -> Tensor | None:
    """Draws the capacity of each expert in tokens, int64 [E]; None: there is no limit.

    With random rounding it is C for some experts and C - 1 for the others, with the mean ``config.mean_capacity``.
    """
    most, mean = config.capacity(num_tokens, training), config.mean_capacity(num_tokens, training)
    if most is None or mean is None:
        return None
    capacity = torch.full((config.num_experts,), most, device=device)
    if mean < most:
        capacity -= (torch.rand(config.num_experts, device=device) >= 1 + mean - most).long()
    return capacity


def pairs_by_token(tokens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Computes ``Routing.by_token`` by a sort, for pairs in any order.

    Args:
        tokens: [R] the index of each pair's token.
    """
    sorted_tokens, order = tokens.sort(stable=True)
    return order, torch.searchsorted(sorted_tokens, torch.arange(num_tokens, device=tokens.device))


def divide(routing: Routing, num_tokens: int, num_parts: int) -> list[Routing]:
    """Divides the pairs by token. The parts have consecutive tokens, and their sizes differ by at most 1 token.

    The host waits for the device once if pairs were dropped.

    Args:
        num_tokens: T. Part p has the tokens from p T / P to (p + 1) T / P, rounded down; it counts them from 0.

    Returns:
        The pairs of each part, again sorted by expert. ``by_token`` is None.
    """
    tokens, num_pairs, num_experts = routing.tokens, len(routing.tokens), len(routing.counts)
    # Arithmetic instead of a table of bounds: a device would wait for the copy of a table.
    part = ((tokens + 1) * num_parts - 1) // max(num_tokens, 1)
    own_tokens = tokens - part * num_tokens // num_parts
    experts = torch.arange(num_experts, device=tokens.device).repeat_interleave(routing.counts, output_size=num_pairs)
    counts = routing.counts.new_zeros(num_parts * num_experts)
    counts = counts.index_add(0, part * num_experts + experts, torch.ones_like(part)).view(num_parts, num_experts)
    if routing.by_token is None:
        sizes = counts.sum(1).tolist()
    else:
        sizes = [size * num_pairs // max(num_tokens, 1) for size in part_sizes(num_tokens, num_parts)]
    order = part.argsort(stable=True)
    parts = (own_tokens[order].split(sizes), routing.gates.index_select(0, order).split(sizes), counts.unbind())
    return [Routing(*each) for each in zip(*parts, strict=True)]


def part_sizes(num_tokens: int, num_parts: int) -> list[int]:
    """Returns the number of tokens of each part of ``divide``."""
    bounds = [num_tokens * part // num_parts for part in range(num_parts + 1)]
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def _ends(sorted_experts: Tensor, num_experts: int) -> Tensor:
    """Returns the end of each expert's range in the sorted choices, [E]."""
    return torch.searchsorted(sorted_experts, torch.arange(num_experts, device=sorted_experts.device), right=True)


class Fp32RouterLinear(torch.autograd.Function):
    """Computes (noise * x) W^T in a wider type than x and W.

    It keeps x and W in their own types for the backward pass. Autograd would keep wide copies, with equal results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        noise: Tensor | None,
        dtype: torch.dtype,
        deferred: DeferredGradient | None = None,
    ) -> Tensor:
        """Returns [T, E] of type ``dtype`` from tokens [T, D], weight [E, D] and noise [T, D] of type ``dtype``.

        ``deferred`` gets the computation of the weight's gradient.
        """
        ctx.save_for_backward(tokens, weight, noise)
        ctx.deferred = deferred
        return nn.functional.linear(_noisy(tokens.to(dtype), noise), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of tokens and weight."""
        tokens, weight, noise = ctx.saved_tensors
        grad, d_tokens, d_weight = grads[0], None, None

        def of_weight() -> Tensor:
            with without_autocast(grad):
                return (grad.t() @ _noisy(tokens.to(grad.dtype), noise)).to(weight.dtype)

        if ctx.needs_input_grad[0]:
            with without_autocast(grad):
                d_tokens = _noisy(grad @ weight.to(grad.dtype), noise).to(tokens.dtype)
        if ctx.deferred is not None:
            ctx.deferred.compute, d_weight = of_weight, placeholder(weight, weight.dtype)
        elif ctx.needs_input_grad[1]:
            d_weight = of_weight()
        return d_tokens, d_weight, None, None, None


def _noisy(rows: Tensor, noise: Tensor | None) -> Tensor:
    return rows if noise is None else rows * noise
