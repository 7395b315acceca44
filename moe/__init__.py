"""Sparsely activated feed-forward layers: expert prototyping and top-k, dropless or with a capacity."""

from moe.attention import MoELinear
from moe.balance import BiasBalancer
from moe.config import MoEConfig
from moe.expert_parallel import apply_expert_parallelism
from moe.layer import MoELayer, MoEOutput
from moe.routing import RoutingStats, check_finite

__all__ = [
    "BiasBalancer",
    "MoEConfig",
    "MoELayer",
    "MoELinear",
    "MoEOutput",
    "RoutingStats",
    "apply_expert_parallelism",
    "check_finite",
]
