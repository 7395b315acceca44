"""The settings of a mixture-of-experts layer."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from moe.payload import Payload


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """What a layer routes, keeps and penalises.

    With Z prototypes of M = num_experts / Z experts, every token is computed by K = Z * top_k experts:
    ``num_prototypes=1`` is classic top-k, ``top_k=1`` is the "Z top-1" of M6-T (arXiv 2105.15082), section 3.

    Attributes:
        num_experts: E, over all prototypes.
        num_prototypes: Z, divides E.
        top_k: experts a token is sent to inside each prototype.
        capacity_factor: an expert computes at most this many times the mean load; None drops no token.
        eval_capacity_factor: the same outside of training.
        capacity_rule: "k" counts the K choices of a token in the capacity; "1" keeps the capacity, and so the
            cost, of a layer with one choice.
        min_capacity: lower bound of the capacity in tokens.
        activation: between the two matrices of an expert.
        aux_loss_weight: weight of the load-balancing loss.
        z_loss_weight: weight of the loss that keeps the router's logits small.
        exchange: how tokens reach experts on other ranks, see ``moe.expert_parallel.exchange_steps``; "auto" takes the
            prototypes' exchange where no way moves fewer bytes.
        payload: the form in which tokens travel: as they are, "bfloat16", or "float8" to the experts and "bfloat16"
            back.
        ranks_per_node: neighbouring ranks with fast links among them, for an exchange between nodes first and inside of
            them next; null makes no difference between ranks.

    Raises:
        ValueError: when numbers do not fit each other.
    """

    num_experts: int
    num_prototypes: int = 1
    top_k: int = 1
    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    capacity_rule: Literal["k", "1"] = "k"
    min_capacity: int = 4
    activation: Literal["gelu", "relu"] = "gelu"
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.0
    exchange: Literal["auto", "all_to_all", "prototype"] = "auto"
    payload: Payload = "same"
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_prototypes", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.num_experts % self.num_prototypes:
            raise ValueError(f"num_experts {self.num_experts} is no multiple of num_prototypes {self.num_prototypes}")
        if self.top_k > self.experts_per_prototype:
            raise ValueError(
                f"top_k {self.top_k} is more than the {self.experts_per_prototype} experts of a prototype "
                f"(num_experts {self.num_experts} / num_prototypes {self.num_prototypes})"
            )
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and not 0 < factor < math.inf:
                raise ValueError(f"{name} is {factor}; expected a positive number, or none to drop no token")
        for name in ("min_capacity", "aux_loss_weight", "z_loss_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number that is not negative")
        if self.capacity_rule not in ("k", "1"):
            raise ValueError(f'capacity_rule is {self.capacity_rule!r}; expected "k" or "1"')
        if self.activation not in ("gelu", "relu"):
            raise ValueError(f'activation is {self.activation!r}; expected "gelu" or "relu"')
        if self.exchange not in ("auto", "all_to_all", "prototype"):
            raise ValueError(f'exchange is {self.exchange!r}; expected "auto", "all_to_all" or "prototype"')
        if self.exchange == "prototype" and self.num_prototypes == 1:
            raise ValueError('exchange is "prototype", but num_prototypes is 1; expected "auto" or "all_to_all"')
        if self.payload not in get_args(Payload):
            raise ValueError(f'payload is {self.payload!r}; expected "same", "bfloat16" or "float8"')
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}; expected at least 1, or none")

    @property
    def experts_per_prototype(self) -> int:
        return self.num_experts // self.num_prototypes

    @property
    def experts_per_token(self) -> int:
        return self.num_prototypes * self.top_k

    def capacity(self, num_tokens: int, training: bool) -> int | None:
        """Tokens one expert computes at most, of ``num_tokens`` that are routed together; None: no bound.

        C = max(min_capacity, ceil(factor * K * T / E)) under rule "k"; K is left out under rule "1".
        """
        factor = self.capacity_factor if training else self.eval_capacity_factor
        if factor is None:
            return None
        choices = self.experts_per_token if self.capacity_rule == "k" else 1
        slots = factor * choices * num_tokens / self.num_experts
        return max(self.min_capacity, math.ceil(round(slots, 6)))  # 1.1 * 100 / 10 is 11.000000000000002
