"""Which experts compute which tokens, and what the choice costs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe.balance import load_balancing_loss, z_loss
from moe.config import MoEConfig
from moe.precision import without_autocast


class RoutingStats(NamedTuple):
    """What happened to this rank's tokens, on their device and outside of autograd; all float32.

    Attributes:
        expert_counts: [E] tokens computed by each of the layer's experts.
        dropped: [Z] (token, expert) pairs that found their expert full, in each prototype.
        num_tokens: [] tokens that are no padding.
        router_entropy: [Z] nats, mean over tokens; not finite when a logit is not.
        chosen_counts: [E] tokens that chose each expert, the dropped ones included.
    """

    expert_counts: Tensor
    dropped: Tensor
    num_tokens: Tensor
    router_entropy: Tensor
    chosen_counts: Tensor


class Routing(NamedTuple):
    """The R (token, expert) pairs to compute, sorted by expert.

    Attributes:
        tokens: [R] int64, index of the pair's token.
        gates: [R] float, factor of the expert's output.
        counts: [E] int64, pairs of each expert.
        by_token: [R] int64, the pairs sorted by token, and offsets: [T] int64, where each token's begin in it, where
            these are known without another sort.
    """

    tokens: Tensor
    gates: Tensor
    counts: Tensor
    by_token: tuple[Tensor, Tensor] | None = None


class Router(nn.Module):
    """A linear map to one logit per expert, computed in at least float32 whatever the model's precision.

    bfloat16 logits tie and flip choices; Switch Transformer (arXiv 2101.03961), section 2.4. In training the inputs
    may be multiplied by uniform noise in [1 - jitter, 1 + jitter], as there.

    Parameter ``weight`` [E, D]; buffer ``balance_bias`` [E] when ``config.balance_bias_rate`` is positive, float32
    under every conversion of the model, since its steps are smaller than the spacing of 16-bit numbers.
    """

    balance_bias: Tensor | None

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.balance_bias_rate else None
        self.register_buffer("balance_bias", bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """[T, D] -> logits [T, Z, M]."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        noise, jitter = None, self.config.router_jitter if self.training else 0.0
        if jitter:
            noise = torch.empty_like(tokens, dtype=dtype).uniform_(1 - jitter, 1 + jitter)
        with without_autocast(tokens):
            logits = WideLinear.apply(tokens, self.weight, noise, dtype)
        return logits.unflatten(-1, (self.config.num_prototypes, self.config.experts_per_prototype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        bias = self.balance_bias
        super()._apply(fn, recurse)
        if bias is not None and self.balance_bias is not None and self.balance_bias.dtype != bias.dtype:
            self.balance_bias = bias.to(self.balance_bias.device)
        return self


class WideLinear(torch.autograd.Function):
    """(noise * x) W^T in a type as wide as those of x and W or wider. For the backward pass they are kept as they are,
    where autograd by itself keeps the wide copies; the numbers are the same."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, noise: Tensor | None, dtype: torch.dtype) -> Tensor:
        """tokens [T, D], weight [E, D], noise [T, D] of type ``dtype`` -> [T, E] of that type."""
        ctx.save_for_backward(tokens, weight, noise)
        return nn.functional.linear(_noisy(tokens.to(dtype), noise), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight, noise = ctx.saved_tensors
        grad, d_tokens, d_weight = grads[0], None, None
        with without_autocast(grad):
            if ctx.needs_input_grad[0]:
                d_tokens = _noisy(grad @ weight.to(grad.dtype), noise).to(tokens.dtype)
            if ctx.needs_input_grad[1]:
                d_weight = (grad.t() @ _noisy(tokens.to(grad.dtype), noise)).to(weight.dtype)
        return d_tokens, d_weight, None, None


def _noisy(rows: Tensor, noise: Tensor | None) -> Tensor:
    return rows if noise is None else rows * noise


def route(
    logits: Tensor, config: MoEConfig, training: bool, balance_bias: Tensor | None = None
) -> tuple[Routing, Tensor, RoutingStats]:
    """Chooses experts for every token inside each prototype; every step in its own function below.

    Args:
        logits: [T, Z, M] of the tokens that are no padding; T may be 0.
        balance_bias: [E], see ``choose``.

    Returns:
        The pairs to compute, the weighted sum of the balancing losses [], and the statistics.
    """
    num_tokens, num_prototypes, _ = logits.shape
    scores = gating_scores(logits, config)
    distribution = scores
    if config.gating != "softmax":
        distribution = scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    if config.routing == "expert_choice":
        routing, chosen_counts = choose_tokens(scores, config, training)
    else:
        gates, experts = choose(scores, config, balance_bias)
        routing, chosen_counts = sort_by_expert(gates, experts, config, training)

    aux_loss = logits.new_zeros(())
    if config.aux_loss_weight:
        choices = chosen_counts.view(num_prototypes, -1)
        aux_loss = config.aux_loss_weight * load_balancing_loss(distribution, choices, config.balance_scope)
    if config.z_loss_weight:
        aux_loss = aux_loss + config.z_loss_weight * z_loss(logits)

    with torch.no_grad():
        # A logit of infinity has no entropy either: NaN marks it in the statistics.
        entropy = torch.special.entr(distribution).sum((0, 2)) / max(num_tokens, 1) + 0 * logits.sum((0, 2))
        stats = RoutingStats(
            expert_counts=routing.counts.float(),
            dropped=(chosen_counts - routing.counts).view(num_prototypes, -1).sum(1).float(),
            num_tokens=torch.full((), num_tokens, dtype=torch.float32, device=logits.device),
            router_entropy=entropy.float(),
            chosen_counts=chosen_counts.float(),
        )
    return routing, aux_loss, stats


def check_finite(stats: Mapping[str, RoutingStats]) -> None:
    """Checks the logits of layers by name, where their statistics are read; waits for the device once.

    The forward pass does not look, since that would wait for the device in every layer: a logit that is not finite
    makes the layer's entropy NaN, and stays visible in sums of it.

    Raises:
        ValueError: naming the layers whose routers met NaN or infinite logits.
    """
    if not stats:
        return
    finite = torch.stack([layer.router_entropy.sum() for layer in stats.values()]).isfinite().tolist()
    broken = [name for name, good in zip(stats, finite, strict=True) if not good]
    if broken:
        raise ValueError(f"router logits are not finite in {', '.join(broken)}")


def gating_scores(logits: Tensor, config: MoEConfig) -> Tensor:
    """[T, Z, M] logits -> scores, whose chosen ones are the gates.

    "softmax": p^z_i = exp(l^z_i) / sum_j exp(l^z_j) inside prototype z, M6-T (arXiv 2105.15082), section 3.
    "global_softmax": the sum is over all experts of all prototypes.
    "sigmoid": 1 / (1 + exp(-l)), DeepSeek-V3 (arXiv 2412.19437), equation 15.
    """
    if config.gating == "sigmoid":
        return logits.sigmoid()
    if config.gating == "global_softmax":
        return logits.flatten(1).softmax(-1).view_as(logits)
    return logits.softmax(-1)


def choose(scores: Tensor, config: MoEConfig, balance_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts of each prototype for every token.

    A ``balance_bias`` b is added to the scores for the choice alone, the gates are the scores without it: auxiliary
    loss free balancing (arXiv 2408.15664), equation 3. ``normalize_gates`` divides the gates by their sum over the
    token's K choices (GShard, arXiv 2006.16668, algorithm 1; DeepSeek-V3, equation 13).

    Args:
        scores: [T, Z, M].

    Returns:
        gates and numbers of the experts in the whole layer, [T, Z, top_k] each, best first.
    """
    with torch.no_grad():
        biased = scores if balance_bias is None else scores + balance_bias.view(scores.shape[1:])
        # max, because topk sorts where one pass will do.
        choices = biased.max(-1, keepdim=True).indices if config.top_k == 1 else biased.topk(config.top_k).indices
    gates = scores.gather(-1, choices)
    if config.normalize_gates:
        gates = gates / gates.sum((1, 2), keepdim=True).clamp(min=torch.finfo(gates.dtype).tiny)
    first_expert = torch.arange(0, config.num_experts, config.experts_per_prototype, device=scores.device)
    return gates, choices + first_expert[:, None]


def sort_by_expert(gates: Tensor, experts: Tensor, config: MoEConfig, training: bool) -> tuple[Routing, Tensor]:
    """Sorts the choices by expert, and drops those beyond an expert's capacity.

    By position, first choices of a prototype go before second choices and earlier tokens before later ones, as in
    GShard (arXiv 2006.16668), algorithm 1. By probability, larger gates go first: V-MoE (arXiv 2106.05974), section 4.

    Args:
        gates, experts: [T, Z, top_k].

    Returns:
        The pairs, and how often each expert was chosen before any pair was dropped, [E].
    """
    num_tokens = len(gates)
    choices = gates.shape[1:].numel()
    capacity = config.capacity(num_tokens, training)
    if capacity is None:
        sorted_experts, order = experts.reshape(-1).sort(stable=True)
        ends = _ends(sorted_experts, config.num_experts)
        counts = ends.diff(prepend=ends.new_zeros(1))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        offsets = torch.arange(0, len(order), choices, device=order.device)
        tokens = order // choices
        return Routing(tokens, gates.reshape(-1).index_select(0, order), counts, (places, offsets)), counts

    # Choice-major: a stable sort by expert then yields each expert's pairs in their order of precedence.
    experts, gates = experts.permute(2, 1, 0).reshape(-1), gates.permute(2, 1, 0).reshape(-1)
    precedence = torch.arange(len(gates), device=gates.device)
    if config.drop_order == "probability":
        precedence = gates.detach().argsort(descending=True, stable=True)
    sorted_experts, order = experts[precedence].sort(stable=True)
    ends = _ends(sorted_experts, config.num_experts)
    chosen_counts = ends.diff(prepend=ends.new_zeros(1))
    place = torch.arange(len(order), device=order.device) - (ends - chosen_counts)[sorted_experts]
    order = precedence[order][place < capacity]
    return Routing(order % max(num_tokens, 1), gates[order], chosen_counts.clamp(max=capacity)), chosen_counts


def choose_tokens(scores: Tensor, config: MoEConfig, training: bool) -> tuple[Routing, Tensor]:
    """Each expert takes the C tokens with its largest scores: expert choice (arXiv 2202.09368), section 3.2.

    C is the capacity, at most T. A token may be taken by any number of experts, of none too. Since a token's
    experts depend on the scores of all others, it does not suit causal models.

    Args:
        scores: [T, Z, M].
    """
    num_tokens = len(scores)
    capacity = config.capacity(num_tokens, training)
    assert capacity is not None  # MoEConfig has seen to it
    capacity = min(capacity, num_tokens)
    gates, tokens = scores.flatten(1).t().topk(capacity, dim=-1)
    counts = torch.full((config.num_experts,), capacity, device=scores.device)
    return Routing(tokens.reshape(-1), gates.reshape(-1), counts), counts


def pairs_by_token(tokens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """``Routing.by_token`` for pairs in any order."""
    sorted_tokens, order = tokens.sort(stable=True)
    return order, torch.searchsorted(sorted_tokens, torch.arange(num_tokens, device=tokens.device))


def _ends(sorted_experts: Tensor, num_experts: int) -> Tensor:
    """Where each expert's choices end, [E]."""
    return torch.searchsorted(sorted_experts, torch.arange(num_experts, device=sorted_experts.device), right=True)
