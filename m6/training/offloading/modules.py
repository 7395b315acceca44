"""Replaces the experts of a model by modules with weights from an offload runtime."""

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
    """The experts of one layer, or shared experts of several layers of a Pseudo model.

    Attributes:
        layers: the layers with these experts.
        layer_indices: numbers of the blocks of these layers.
    """

    experts: Experts
    layers: list[MoELayer] = field(default_factory=list)
    layer_indices: list[int] = field(default_factory=list)

    def stack(self, name: str) -> Stack:
        """Returns the number and the shapes of the experts, in the form of the package ``offload``."""
        shapes = {key: tuple(parameter.shape[1:]) for key, parameter in self.experts.named_parameters()}
        (rows, _), (_, inner) = shapes["w_in"], shapes["w_out"]
        return Stack(name, len(self.experts.w_in), shapes, {"w_in": rows // inner})  # SwiGLU: of gate and value


def experts_of(model: nn.Module) -> dict[str, ExpertUse]:
    """Finds the experts of a model.

    Returns:
        prefix of the names of the experts' parameters -> the experts. Experts shared by layers have the names of the
        first such layer.
    """
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


def stream(use: ExpertUse, provider: WeightProvider, stack: str, divisor: int = 1) -> None:
    """Makes the layers read the weights of their experts from ``provider``.

    The model then has no parameters of these experts, so DeepSpeed does not train them.

    Args:
        stack: name of the experts in ``provider``.
        divisor: divides the gradient of each use. The number of uses as divisor gives the mean gradient, not the sum.
    """
    streamed = _Streamed(use.experts, provider, stack, divisor)
    for layer in use.layers:
        layer.experts = streamed  # type: ignore[assignment]
        # With expert parallelism the layer is of a subclass. DeepSpeed would look for the experts' parameters in it.
        layer.__class__ = MoELayer


def offload_activations(
    model: M6ForConditionalGeneration, activations: ActivationOffload, parts: Collection[LayerModule]
) -> None:
    """Offloads autograd's saved tensors of these parts to the host. Call it after ``stream``.

    If all kinds of a layer are listed, the whole block is one unit. The block's residual sums belong to no kind; they
    are then offloaded too, and with activation checkpointing the block's input. A module shared by several layers is
    offloaded in all of them.
    """
    if ("embedding", None) in parts and not isinstance(model.model.embeddings, nn.Identity):
        _offload_saved_tensors(model.model.embeddings, activations)
    wrapped: set[int] = set()
    for layer, block in enumerate(model.model.layers):
        if not isinstance(block, M6Block):
            continue  # on another rank of a pipeline
        kinds = {kind for kind, part_layer in parts if part_layer == layer}
        modules = _modules(block)
        for module in [block] if kinds == set(modules) else [item for kind in kinds for item in modules[kind]]:
            if id(module) not in wrapped:
                wrapped.add(id(module))
                _offload_saved_tensors(module, activations)


def _modules(block: M6Block) -> dict[ModuleKind, list[nn.Module]]:
    modules: dict[ModuleKind, list[nn.Module]] = {
        "attention": [block.attention],
        "norm": [block.attention_norm, block.ffn_norm],
    }
    if not isinstance(block.ffn, MoELayer):
        return {**modules, "ffn": [block.ffn]}
    modules |= {"expert": [block.ffn.experts], "router": [block.ffn.router]}
    return modules if block.ffn.shared is None else {**modules, "ffn": [block.ffn.shared]}


def _offload_saved_tensors(module: nn.Module, activations: ActivationOffload) -> None:
    """Gives the module a subclass with a ``__call__`` inside ``activations.unit``.

    Forward hooks cannot do this: they cannot hold a context open, and activation checkpointing starts in ``__call__``.
    """
    base: Any = type(module)

    def call(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        with activations.unit([*self.parameters(), *self.buffers()]):
            return base.__call__(self, *arguments, **named)

    module.__class__ = type(base.__name__, (base,), {"__call__": call})


class _Streamed(nn.Module):
    """Offloaded experts with the interface of ``moe.experts.Experts``: sorted rows, or tokens and pairs.

    Dropout is drawn for all rows at once, as in ``Experts``. It therefore does not depend on the size of chunks.
    """

    def __init__(self, experts: Experts, provider: WeightProvider, stack: str, divisor: int) -> None:
        super().__init__()
        self._compute = _Compute(experts, divisor)
        self._streamed = StreamedExperts(self._compute, provider, stack)

    def forward(self, rows: Tensor, counts: Tensor, pairs: Pairs | None = None) -> Tensor:
        # The experts are no submodule, so train() and eval() of the model do not reach them.
        experts = self._compute.experts.train(self.training)
        tokens = rows
        if pairs is not None:
            rows = tokens.index_select(0, pairs.source)
        outputs = self._streamed(rows, counts, experts.draw_dropout(len(rows), rows.device))
        return outputs if pairs is None else combine(outputs, Routing(pairs.source, pairs.gates, counts), tokens)


class _Compute:
    """Runs the forward pass of ``experts`` with given weights; not a module, so the model has no such parameters."""

    def __init__(self, experts: Experts, divisor: int) -> None:
        self.experts, self._divisor = experts, divisor
        self._names = [name for name, _ in experts.named_parameters()]

    def __call__(self, rows: Tensor, counts: Tensor, *weights: Tensor, row_values: Tensor | None = None) -> Tensor:
        for weight in weights:
            if self._divisor > 1 and weight.requires_grad:
                weight.register_hook(self._divide)
        parameters = dict(zip(self._names, weights, strict=True))
        arguments = {"row_values": row_values}
        output: Tensor = torch.func.functional_call(self.experts, parameters, (rows, counts), arguments)
        return output

    def _divide(self, gradient: Tensor) -> Tensor:
        return gradient / self._divisor
