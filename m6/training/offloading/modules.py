"""A model whose experts come from somewhere else while they compute."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from m6.config.offload import ModuleKind
from m6.config.offload_rules import LayerModule
from m6.model.modeling import M6Block, M6ForConditionalGeneration
from moe.dispatch import combine
from moe.experts import Experts
from moe.kernels.experts_op import Pairs
from moe.layer import MoELayer
from moe.routing import Routing
from offload import ActivationOffload, Stack, StreamedExperts
from offload.runtime.experts import WeightProvider


@dataclass
class ExpertUse:
    """Experts of a model, and the layers that use them: several in the Pseudo model, which share one set.

    Attributes:
        layer_indices: of the blocks.
    """

    experts: Experts
    layers: list[MoELayer] = field(default_factory=list)
    layer_indices: list[int] = field(default_factory=list)

    def stack(self, name: str) -> Stack:
        shapes = {key: tuple(parameter.shape[1:]) for key, parameter in self.experts.named_parameters()}
        return Stack(name, len(self.experts.w_in), shapes)


def experts_of(model: nn.Module) -> dict[str, ExpertUse]:
    """By the name that the experts' parameters have in the model: of the first layer that uses them."""
    uses: dict[int, ExpertUse] = {}
    names: dict[int, str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, MoELayer):
            key = id(layer.experts)
            names.setdefault(key, f"{name}.experts")
            use = uses.setdefault(key, ExpertUse(layer.experts))
            use.layers.append(layer)
            use.layer_indices.append(int(name.split("layers.")[1].split(".")[0]))
    return {names[key]: use for key, use in uses.items()}


def stream(use: ExpertUse, holder: WeightProvider, stack: str, divisor: int = 1) -> None:
    """Makes the layers take their experts' weights from ``holder``. DeepSpeed then sees neither parameters nor, under
    expert parallelism, the class of layers by which it would ask for them.

    Args:
        divisor: of every use's gradients.
    """
    streamed = _Streamed(use.experts, holder, stack, divisor)
    for layer in use.layers:
        layer.experts = streamed  # type: ignore[assignment]
        layer.__class__ = MoELayer


def take_activations(
    model: M6ForConditionalGeneration, activations: ActivationOffload, parts: Collection[LayerModule]
) -> None:
    """Takes what autograd saves in these parts to the host; to be called behind ``stream``.

    A layer of which all kinds are named is one unit: then what is of no kind, as the sums, goes too, and under
    activation checkpointing the layer's input. A module that layers share goes for all of them.
    """
    if ("embedding", None) in parts:
        _take(model.model.embeddings, activations)
    taken: set[int] = set()
    for layer, block in enumerate(model.model.layers):
        assert isinstance(block, M6Block)
        kinds = {kind for kind, other in parts if other == layer}
        modules = _modules(block)
        for module in [block] if kinds == set(modules) else [own for kind in kinds for own in modules[kind]]:
            if id(module) not in taken:
                taken.add(id(module))
                _take(module, activations)


def _modules(block: M6Block) -> dict[ModuleKind, list[nn.Module]]:
    found: dict[ModuleKind, list[nn.Module]] = {
        "attention": [block.attention],
        "norm": [block.attention_norm, block.ffn_norm],
    }
    if not isinstance(block.ffn, MoELayer):
        return {**found, "ffn": [block.ffn]}
    found |= {"expert": [block.ffn.experts], "router": [block.ffn.router]}
    return found if block.ffn.shared is None else {**found, "ffn": [block.ffn.shared]}


def _take(module: nn.Module, activations: ActivationOffload) -> None:
    """By a class of its own, since hooks cannot be around a call, and checkpointing begins inside of it."""

    own: Any = type(module)

    def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        with activations.unit([*self.parameters(), *self.buffers()]):
            return own.__call__(self, *arguments, **named)

    module.__class__ = type(own.__name__, (own,), {"__call__": call})


class _Streamed(nn.Module):
    """Can be called as ``moe.experts.Experts``: with sorted rows, or with tokens and pairs.

    Dropout is drawn for all rows at once, as resident experts do, so that chunks do not show in it.
    """

    def __init__(self, experts: Experts, holder: WeightProvider, stack: str, divisor: int) -> None:
        super().__init__()
        self._compute = _Compute(experts, divisor)
        self._streamed = StreamedExperts(self._compute, holder, stack)

    def forward(self, rows: Tensor, counts: Tensor, pairs: Pairs | None = None) -> Tensor:
        experts = self._compute.experts.train(self.training)
        tokens = rows
        if pairs is not None:
            rows = tokens.index_select(0, pairs.source)
        outputs = self._streamed(rows, counts, experts.draw_dropout(len(rows), rows.device))
        return outputs if pairs is None else combine(outputs, Routing(pairs.source, pairs.gates, counts), tokens)


class _Compute:
    """The computation of a module of experts, which is no part of the model, on other weights than its own."""

    def __init__(self, experts: Experts, divisor: int) -> None:
        self.experts, self._divisor = experts, divisor
        self._names = [name for name, _ in experts.named_parameters()]

    def __call__(self, rows: Tensor, counts: Tensor, *weights: Tensor, row_values: Tensor | None = None) -> Tensor:
        for weight in weights:
            if self._divisor > 1 and weight.requires_grad:
                weight.register_hook(self._divide)
        own = dict(zip(self._names, weights, strict=True))
        arguments = {"row_values": row_values}
        output: Tensor = torch.func.functional_call(self.experts, own, (rows, counts), arguments)
        return output

    def _divide(self, gradient: Tensor) -> Tensor:
        return gradient / self._divisor
