"""The settings of a mixture-of-experts layer."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

DispatchDtype = Literal["same", "bfloat16", "float8", "float8_both"]

# A type hint -> the accepted types of values, and their name in errors.
_TYPES = {int: ((int,), "an integer"), float: ((int, float), "a number"), bool: ((bool,), "true or false")}


# Far above what any layer needs, and small enough that products of them do not overflow.
_LARGEST: dict[str, float] = {
    "num_experts": 2**20,
    "num_shared_experts": 2**10,
    "min_capacity": 2**30,
    "capacity_factor": 1e6,
    "eval_capacity_factor": 1e6,
    "aux_loss_weight": 1e6,
    "z_loss_weight": 1e6,
    "balance_bias_rate": 1e6,
    "ranks_per_node": 2**16,
    "overlap_parts": 2**10,
}
_SMALLEST_FACTOR = 1e-9


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """How a layer routes tokens, how it computes and exchanges them, and which losses it adds.

    The E = num_experts experts are split into Z prototypes of M = E / Z experts. K = Z * top_k experts compute each
    token: ``num_prototypes=1`` is top-k routing, ``top_k=1`` is the "Z top-1" of M6-T (arXiv 2105.15082), section 3.

    ``__post_init__`` checks all values and combinations. No other place checks them.

    Attributes:
        num_experts: E, the number of experts of the layer.
        num_prototypes: Z; must divide E. In our runs, top-k routing with the same number of experts per token learned
            equally well or better, see docs/guides/moe.md.
        top_k: the number of experts of each token in each prototype.
        num_groups: G groups of experts, each with an equal part of every prototype. The experts of a group have
            consecutive numbers, so the ranks of a node can hold whole groups. Must divide M.
        groups_per_token: a token chooses its experts only in this number of best groups, and is sent to few nodes:
            node-limited routing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), see ``moe.groups.best_groups``.
        gating: scores are the softmax over a prototype's experts ("softmax"), over all experts ("global_softmax"),
            or the sigmoid of each logit ("sigmoid", DeepSeek-V3, arXiv 2412.19437, equation 15).
        normalize_gates: divide a token's gates by their sum over its K choices.
        capacity_factor: an expert computes at most this multiple of the mean load; None drops no token.
        eval_capacity_factor: the capacity factor outside of training.
        capacity_rule: "k" counts the K choices of a token in the capacity; "1" has the capacity, and so the cost, of
            a layer with one choice.
        min_capacity: lower bound of the capacity in tokens.
        capacity_rounding: a fractional capacity is rounded up ("up"). With "random", in training, it is rounded up or
            down at random for each expert, with the fraction as the probability of up; the mean capacity is then exact.
        drop_order: the order of dropping pairs of a full expert. "position" keeps first choices before second choices
            and earlier tokens before later tokens; "probability" keeps larger gates (V-MoE, arXiv 2106.05974, section
            4); "causal" keeps earlier places of all rows, so that no token depends on a later token of its row.
        router_jitter: in training, the router's inputs are multiplied by random numbers in [1 - jitter, 1 + jitter].
        activation: the function between the two matrices of an expert; "swiglu" doubles the rows of the first matrix.
        bias: experts add bias vectors after their matrices.
        expert_dropout: the dropout probability of an expert's hidden units, in training.
        num_shared_experts: shared experts for every token, in addition to the routed experts (arXiv 2401.06066).
        shared_expert_gate: multiply the shared experts' output by the sigmoid of a linear map of the token (Qwen2-MoE).
        aux_loss_weight: weight of the load-balancing loss.
        balance_scope: the load-balancing loss counts the loads of this rank's micro-batch ("micro_batch"), of the
            simultaneous micro-batches of all ranks ("global_batch", arXiv 2501.11873), or of each sample ("sequence",
            DeepSeek-V3, arXiv 2412.19437, equation 17). Only "sequence" does not depend on the split of a batch.
        z_loss_weight: weight of the z-loss; it keeps the router's logits small.
        balance_bias_rate: step of the biases for load balancing without a loss (arXiv 2408.15664); 0: no biases.
        recompute_activation: compute the hidden activation again in the backward pass instead of keeping it.
        exchange: the kind of exchange with experts on other ranks, see ``moe.exchange_steps.exchange_steps``; "auto"
            chooses the exchange with fewer rows.
        dispatch_dtype: the number format of rows exchanged between ranks (all-to-all, all-gather, reduce-scatter):
            "same" as in the model, "bfloat16", "float8" for dispatch and bfloat16 for combine, or "float8_both" for
            float8 in both directions.
        ranks_per_node: the number of neighbouring ranks in a node with fast links. Tokens are then exchanged first
            between nodes and then inside them. None: all ranks count as one node.
        overlap_parts: the number of parts of a layer's tokens in the exchange with other ranks. One part is in flight
            while the experts compute another part. 1: only the shared experts overlap with the exchange.

    Raises:
        ValueError: a value has the wrong type or range, or values do not fit each other; the message begins with the
            field's name.
    """

    num_experts: int
    num_prototypes: int = 1
    top_k: int = 1
    num_groups: int = 1
    groups_per_token: int = 1
    gating: Literal["softmax", "global_softmax", "sigmoid"] = "softmax"
    normalize_gates: bool = False
    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    capacity_rule: Literal["k", "1"] = "k"
    min_capacity: int = 4
    capacity_rounding: Literal["up", "random"] = "up"
    drop_order: Literal["position", "probability", "causal"] = "position"
    router_jitter: float = 0.0
    activation: Literal["gelu", "relu", "swiglu"] = "gelu"
    bias: bool = False
    expert_dropout: float = 0.0
    num_shared_experts: int = 0
    shared_expert_gate: bool = False
    aux_loss_weight: float = 0.01
    balance_scope: Literal["micro_batch", "global_batch", "sequence"] = "micro_batch"
    z_loss_weight: float = 0.0
    balance_bias_rate: float = 0.0
    recompute_activation: bool = False
    exchange: Literal["auto", "all_to_all", "prototype"] = "auto"
    dispatch_dtype: DispatchDtype = "same"
    ranks_per_node: int | None = None
    overlap_parts: int = 1

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_against_each_other()

    def _check_types(self) -> None:
        for name, hint in _hints().items():
            value, options = getattr(self, name), get_args(hint) or (hint,)
            if isinstance(options[0], str):  # a Literal
                fits, expected = value in options, " or ".join(f'"{option}"' for option in options)
            else:
                expected_type, *none = options
                accepted, expected = _TYPES[expected_type]
                # Python counts True as an int.
                fits = isinstance(value, accepted) and isinstance(value, bool) == (expected_type is bool)
                if none:
                    fits, expected = fits or value is None, f"{expected}, or none"
            if not fits:
                raise ValueError(f"{name} is {value!r}; expected {expected}")

    def _check_ranges(self) -> None:
        for name in ("num_experts", "num_prototypes", "top_k", "num_groups", "groups_per_token", "overlap_parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        for name, largest in _LARGEST.items():
            if (getattr(self, name) or 0) > largest:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at most {largest}")
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and not _SMALLEST_FACTOR <= factor < math.inf:
                raise ValueError(
                    f"{name} is {factor}; expected at least {_SMALLEST_FACTOR:g}, or none to drop no token"
                )
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
            raise ValueError(
                f"num_experts {self.num_experts} is not a multiple of num_prototypes {self.num_prototypes}"
            )
        if self.top_k > self.experts_per_prototype:
            raise ValueError(
                f"top_k {self.top_k} is more than the {self.experts_per_prototype} experts of a prototype "
                f"(num_experts {self.num_experts} / num_prototypes {self.num_prototypes})"
            )
        if self.normalize_gates and self.num_prototypes * self.top_k == 1:
            raise ValueError(
                "normalize_gates is true, but with num_prototypes 1 and top_k 1 a token has one expert: its gate would "
                "always be 1, and the router would learn nothing from the task; use false"
            )
        if self.experts_per_prototype % self.num_groups:
            raise ValueError(
                f"num_groups {self.num_groups} does not divide the {self.experts_per_prototype} experts of a prototype"
            )
        if self.groups_per_token > self.num_groups:
            raise ValueError(f"groups_per_token {self.groups_per_token} is more than num_groups {self.num_groups}")
        choices = self.groups_per_token * self.experts_per_prototype // self.num_groups
        if self.top_k > choices:
            raise ValueError(
                f"groups_per_token {self.groups_per_token} leaves {choices} experts of each prototype to a token; "
                f"top_k {self.top_k} needs {-(-self.top_k * self.num_groups // self.experts_per_prototype)} groups"
            )
        if self.exchange == "prototype" and self.num_groups > 1:
            raise ValueError(
                f'exchange is "prototype", but each of num_groups {self.num_groups} has experts of all prototypes; '
                'expected "auto" or "all_to_all"'
            )
        if self.shared_expert_gate and not self.num_shared_experts:
            raise ValueError("shared_expert_gate is true, but num_shared_experts is 0; expected at least 1")
        if self.exchange == "prototype" and self.num_prototypes == 1:
            raise ValueError('exchange is "prototype", but num_prototypes is 1; expected "auto" or "all_to_all"')

    @property
    def experts_per_prototype(self) -> int:
        """M."""
        return self.num_experts // self.num_prototypes

    @property
    def experts_per_token(self) -> int:
        """K, without the shared experts."""
        return self.num_prototypes * self.top_k

    @property
    def kept_share(self) -> float:
        """The share of a token's K choices that the training capacity keeps if all experts are chosen equally often.

        ``min_capacity``, rounding and chance are left out: their effect shrinks as the number of tokens grows. For a
        given number of tokens see ``moe.expectation``.
        """
        if self.capacity_factor is None:
            return 1.0
        return min(1.0, self.capacity_factor / (1 if self.capacity_rule == "k" else self.experts_per_token))

    def exchange_parts(self, ep_size: int) -> int:
        """Returns the number of parts in which a layer exchanges its tokens: 1 if all experts are on this rank."""
        return self.overlap_parts if ep_size > 1 else 1

    def capacity(self, num_tokens: int, training: bool) -> int | None:
        """Returns C, the largest number of tokens that one expert computes of ``num_tokens``; None: there is no limit.

        Under the rule "k", C = max(min_capacity, ceil(factor * K * T / E)): GShard (arXiv 2006.16668), section 2.2,
        with M6-T's factor. The rule "1" leaves out K (M6-T, section 3.2). C is at least 1 if there are tokens.
        """
        slots = self._slots(num_tokens, training)
        # 1.1 * 100 / 10 gives 11.000000000000002
        return None if slots is None else max(self.min_capacity, math.ceil(slots * (1 - 1e-12)))

    def mean_capacity(self, num_tokens: int, training: bool) -> float | None:
        """Returns the mean of C over the experts.

        With random rounding in training it is factor * K * T / E, but at least ``min_capacity``; otherwise it equals
        ``capacity``.
        """
        slots, most = self._slots(num_tokens, training), self.capacity(num_tokens, training)
        if slots is None or most is None or not training or self.capacity_rounding == "up":
            return most
        return min(most, max(self.min_capacity, slots))

    def _slots(self, num_tokens: int, training: bool) -> float | None:
        factor = self.capacity_factor if training else self.eval_capacity_factor
        if factor is None:
            return None
        choices = self.experts_per_token if self.capacity_rule == "k" else 1
        return factor * choices * num_tokens / self.num_experts


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(MoEConfig)
