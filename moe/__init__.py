"""Sparsely activated feed-forward layers: expert prototyping and top-k routing, with or without a capacity.

``MoEConfig`` needs no torch. The other names are imported at their first use, so settings can be checked without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe.config import MoEConfig

if TYPE_CHECKING:
    from moe.bias_balancer import BiasBalancer
    from moe.collect import collect_outputs
    from moe.deferred_gradients import DeferredLinear, clear_deferred_gradients, defer_gradients
    from moe.expert_parallel import apply_expert_parallelism
    from moe.layer import MoELayer, MoEOutput
    from moe.parts import SequenceSlice, SequenceSlices
    from moe.routing import RoutingStats

__all__ = [
    "BiasBalancer",
    "DeferredLinear",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "RoutingStats",
    "SequenceSlice",
    "SequenceSlices",
    "apply_expert_parallelism",
    "clear_deferred_gradients",
    "collect_outputs",
    "defer_gradients",
]
_MODULES = {
    "BiasBalancer": "bias_balancer",
    "DeferredLinear": "deferred_gradients",
    "MoELayer": "layer",
    "MoEOutput": "layer",
    "RoutingStats": "routing",
    "SequenceSlice": "parts",
    "SequenceSlices": "parts",
    "apply_expert_parallelism": "expert_parallel",
    "collect_outputs": "collect",
    "defer_gradients": "deferred_gradients",
    "clear_deferred_gradients": "deferred_gradients",
}

if not TYPE_CHECKING:  # type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        """Imports a name of ``__all__`` (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
