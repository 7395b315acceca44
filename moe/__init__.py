"""Sparsely activated feed-forward layers: expert prototyping and top-k routing, with or without a capacity."""

from moe.bias_balancer import BiasBalancer
from moe.collect import collect_outputs
from moe.config import MoEConfig
from moe.deferred_gradients import DeferredLinear, defer_gradients, forget_deferred
from moe.expert_parallel import apply_expert_parallelism
from moe.layer import MoELayer, MoEOutput
from moe.parts import TokenPart, TokenParts
from moe.routing import RoutingStats

__all__ = [
    "BiasBalancer",
    "DeferredLinear",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "RoutingStats",
    "TokenPart",
    "TokenParts",
    "apply_expert_parallelism",
    "collect_outputs",
    "defer_gradients",
    "forget_deferred",
]
