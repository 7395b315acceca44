"""The settings of a mixture-of-experts layer."""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from moe.payload import Payload

_KINDS = {int: ((int,), "an integer"), float: ((int, float), "a number"), bool: ((bool,), "true or false")}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """What a layer routes, keeps and penalises.

    With Z prototypes of M = num_experts / Z experts, every token is computed by K = Z * top_k experts:
    ``num_prototypes=1`` is classic top-k, ``top_k=1`` is the "Z top-1" of M6-T (arXiv 2105.15082), section 3.

    Attributes:
        num_experts: E, over all prototypes.
        num_prototypes: Z, divides E.
        top_k: experts a token is sent to inside each prototype.
        routing: "token_choice", tokens choose experts; or "expert_choice", each expert takes the tokens it scores
            highest, as many as its capacity (arXiv 2202.09368), which looks at later tokens.
        gating: scores are the softmax over a prototype's experts ("softmax"), over all experts ("global_softmax"),
            or the sigmoid of each logit ("sigmoid", DeepSeek-V3, arXiv 2412.19437, equation 15).
        normalize_gates: divide a token's gates by their sum over its K choices.
        capacity_factor: an expert computes at most this many times the mean load; None drops no token.
        eval_capacity_factor: the same outside of training.
        capacity_rule: "k" counts the K choices of a token in the capacity; "1" keeps the capacity, and so the
            cost, of a layer with one choice.
        min_capacity: lower bound of the capacity in tokens.
        drop_order: who finds a place in a full expert: first choices before second and earlier tokens before later
            ones ("position"), or those with larger gates ("probability", V-MoE, arXiv 2106.05974, section 4).
        router_jitter: in training, the router's inputs are multiplied by uniform numbers in 1 -+ this.
        activation: between the two matrices of an expert; swiglu has twice the rows in the first.
        bias: experts add vectors after their matrices.
        expert_dropout: in training, the rate at which hidden units of experts are zeroed.
        num_shared_experts: experts that compute every token, beside the routed ones (arXiv 2401.06066).
        shared_expert_gate: multiply the shared experts' output by the sigmoid of a linear map of the token (Qwen2-MoE).
        aux_loss_weight: weight of the load-balancing loss.
        balance_scope: the loads in that loss are those of this rank's micro-batch, or of the micro-batch on all ranks
            ("global_batch", arXiv 2501.11873).
        z_loss_weight: weight of the loss that keeps the router's logits small.
        balance_bias_rate: step of the biases that balance the load without a loss (arXiv 2408.15664); 0: none.
        recompute_activation: compute the hidden activation again in the backward pass instead of keeping it.
        exchange: how tokens reach experts on other ranks, see ``moe.expert_parallel.exchange_steps``; "auto" takes
            what moves fewer rows.
        payload: the form in which tokens travel: as they are, "bfloat16", or "float8" to the experts and "bfloat16"
            back.
        ranks_per_node: neighbouring ranks with fast links among them, for an exchange between nodes first and inside of
            them next; null makes no difference between ranks.

    Raises:
        ValueError: for a value of another type or range, and when values do not fit each other.
    """

    num_experts: int
    num_prototypes: int = 1
    top_k: int = 1
    routing: Literal["token_choice", "expert_choice"] = "token_choice"
    gating: Literal["softmax", "global_softmax", "sigmoid"] = "softmax"
    normalize_gates: bool = False
    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    capacity_rule: Literal["k", "1"] = "k"
    min_capacity: int = 4
    drop_order: Literal["position", "probability"] = "position"
    router_jitter: float = 0.0
    activation: Literal["gelu", "relu", "swiglu"] = "gelu"
    bias: bool = False
    expert_dropout: float = 0.0
    num_shared_experts: int = 0
    shared_expert_gate: bool = False
    aux_loss_weight: float = 0.01
    balance_scope: Literal["micro_batch", "global_batch"] = "micro_batch"
    z_loss_weight: float = 0.0
    balance_bias_rate: float = 0.0
    recompute_activation: bool = False
    exchange: Literal["auto", "all_to_all", "prototype"] = "auto"
    payload: Payload = "same"
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_against_each_other()

    def _check_types(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value, options = getattr(self, name), get_args(hint) or (hint,)
            if isinstance(options[0], str):  # a Literal
                fits, expected = value in options, " or ".join(f'"{option}"' for option in options)
            else:
                kind, *none = options
                accepted, expected = _KINDS[kind]
                fits = isinstance(value, accepted) and isinstance(value, bool) == (kind is bool)  # True is an int, too
                if none:
                    fits, expected = fits or value is None, f"{expected}, or none"
            if not fits:
                raise ValueError(f"{name} is {value!r}; expected {expected}")

    def _check_ranges(self) -> None:
        for name in ("num_experts", "num_prototypes", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and not 0 < factor < math.inf:
                raise ValueError(f"{name} is {factor}; expected a positive number, or none to drop no token")
        for name in ("min_capacity", "num_shared_experts", "aux_loss_weight", "z_loss_weight", "balance_bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number that is not negative")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}; expected at least 1, or none")
        for name in ("router_jitter", "expert_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number in [0, 1)")

    def _check_against_each_other(self) -> None:
        if self.num_experts % self.num_prototypes:
            raise ValueError(f"num_experts {self.num_experts} is no multiple of num_prototypes {self.num_prototypes}")
        if self.top_k > self.experts_per_prototype:
            raise ValueError(
                f"top_k {self.top_k} is more than the {self.experts_per_prototype} experts of a prototype "
                f"(num_experts {self.num_experts} / num_prototypes {self.num_prototypes})"
            )
        if self.routing == "expert_choice":
            for name in ("capacity_factor", "eval_capacity_factor"):
                if getattr(self, name) is None:
                    raise ValueError(f'{name} is none, but with routing "expert_choice" experts take what it gives')
            ignored = ["normalize_gates", "drop_order", "balance_scope", "balance_bias_rate"]
            if self.capacity_rule == "1":  # the other counts it in the capacity
                ignored.append("top_k")
            for field in fields(self):
                value = getattr(self, field.name)
                if field.name in ignored and value != field.default:
                    raise ValueError(
                        f'{field.name} is {value!r}, but with routing "expert_choice" it plays no part; '
                        f"expected {field.default!r}"
                    )
        if self.shared_expert_gate and not self.num_shared_experts:
            raise ValueError("shared_expert_gate is true, but num_shared_experts is 0; expected at least 1")
        if self.exchange == "prototype" and self.num_prototypes == 1:
            raise ValueError('exchange is "prototype", but num_prototypes is 1; expected "auto" or "all_to_all"')

    @property
    def experts_per_prototype(self) -> int:
        return self.num_experts // self.num_prototypes

    @property
    def experts_per_token(self) -> int:
        return self.num_prototypes * self.top_k

    def capacity(self, num_tokens: int, training: bool) -> int | None:
        """Tokens one expert computes at most, of ``num_tokens`` that are routed together; None: no bound.

        C = max(min_capacity, ceil(factor * K * T / E)) under rule "k" (GShard, arXiv 2006.16668, section 2.2, with
        M6-T's factor); K is left out under rule "1" (M6-T, section 3.2).

        Raises:
            ValueError: when there are tokens but no place for any.
        """
        factor = self.capacity_factor if training else self.eval_capacity_factor
        if factor is None:
            return None
        choices = self.experts_per_token if self.capacity_rule == "k" else 1
        slots = factor * choices * num_tokens / self.num_experts
        capacity = max(self.min_capacity, math.ceil(round(slots, 6)))  # 1.1 * 100 / 10 is 11.000000000000002
        if self.min_capacity == 0 and num_tokens > 0 and capacity == 0:  # a compiler cannot ask how many tokens
            raise ValueError(
                f"{'' if training else 'eval_'}capacity_factor {factor} leaves no place for any of {num_tokens} tokens "
                f"in {self.num_experts} experts, and min_capacity is 0"
            )
        return capacity
