"""The additional metrics of a Pseudo-to-Real run: it compares the gradients and the weights of its layers."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.architecture.sharing import Sharing
from m6.model.modeling import M6Block, M6ForConditionalGeneration
from m6.training.deepspeed_private import (
    GroupKind,
    full_numel,
    is_expert,
    is_partitioned,
    local_part,
    named_expert_group,
)
from m6.training.engine.engine import Engine
from m6.training.stages.stage import Stage


class StageMetrics:
    """Compares the layers in some of the steps; reports nothing for a run without a Pseudo phase."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._gradients: LayerGradients | None = None
        self._entry: dict[str, Any] = {}

    def watch(self, engine: Engine, step: int) -> AbstractContextManager[Any]:
        """A context around the step after ``step`` steps. It collects the layers' gradients if a comparison is due."""
        self._gradients = LayerGradients(engine.module) if self._stage.measures(step) else None
        return self._gradients or contextlib.nullcontext()

    def measure(self, engine: Engine) -> list[float] | None:
        """Returns the correlations of adjacent layers' gradients in the finished step; None if none was due."""
        if self._gradients is None:
            return None
        correlations, self._gradients = self._gradients.correlations(), None
        self._entry["gradient_correlation"] = correlations
        sharing = self._stage.planned_sharing
        if not self._stage.is_pseudo and sharing is not None:
            self._entry["layer_divergence"] = layer_divergence(engine.module, sharing)
        return correlations

    def record_delinking(self, seconds: float) -> None:
        """Records the pause of the training by the switch to the Real model, in seconds."""
        self._entry["delink_s"] = seconds

    def finish(self, engine: Engine) -> dict[str, Any]:
        """Returns the metrics of a log interval and starts the next interval.

        Returns:
            {"stage": ...} with name: pseudo or real; switch_step: null before the switch; state_bytes: weights and
            optimizer state of this rank, on device and host. If measured in the interval: gradient_correlation of
            layers 0 and 1, 1 and 2, ...; layer_divergence of each layer; delink_s: seconds of the switch.
        """
        if self._stage.settings is None:
            return {}
        entry, self._entry = self._entry, {}
        return {
            "stage": {
                "name": self._stage.name,
                "switch_step": self._stage.switch_step,
                "state_bytes": sum(engine.state_bytes().values()),
                **entry,
            }
        }


SAMPLE_SIZE = 1 << 16
_INDEX_ARGUMENT = 3  # of M6Block.forward


class LayerGradients(contextlib.ExitStack):
    """A context for the gradients of each layer's use of its weights, also if layers share weights.

    Each use gets a view of the weight, and a hook on the view receives the gradient of this use. Autograd adds the
    gradients as without views, so the training step does not change.

    For a tensor with more than ``sample_size`` elements, only ``sample_size`` elements at fixed random indices are
    kept, and the correlation is an estimate. The samples are fp32, and their memory does not grow with the model's
    width. The context works with every ZeRO stage and with activation checkpointing.
    """

    def __init__(self, model: M6ForConditionalGeneration, sample_size: int = SAMPLE_SIZE) -> None:
        super().__init__()
        self._blocks: list[M6Block] = list(model.model.layers)
        self._sample_size = sample_size
        self._layer: int | None = None  # in its forward pass; None during recomputation
        self._gradients: list[dict[str, Tensor]] = []
        self._indices: dict[str, Tensor | None] = {}
        self._experts: dict[str, nn.Parameter] = {}
        self._replaced: dict[tuple[nn.Module, str], nn.Parameter] = {}

    def __enter__(self) -> LayerGradients:
        super().__enter__()
        hooked: set[nn.Module] = set()
        for block in self._blocks:
            gradients = {}
            for path, parameter in block.named_parameters():
                if parameter.requires_grad:
                    gradients[path] = self._sample(path, parameter)
                    if is_expert(parameter):
                        self._experts[path] = parameter
            self._gradients.append(gradients)
            self._hook(block.register_forward_pre_hook(self._enter_block))
            self._hook(block.register_forward_hook(self._leave_block, always_call=True))
            for path, module in block.named_modules():
                if module not in hooked and next(module.parameters(recurse=False), None) is not None:
                    hooked.add(module)
                    self._hook(module.register_forward_pre_hook(functools.partial(self._use_views, path)))
                    # Before the other hooks: the hook of ZeRO stage 3 needs the original parameters.
                    self._hook(module.register_forward_hook(self._use_parameters, prepend=True, always_call=True))
        return self

    def correlations(self) -> list[float]:
        """Returns the cosine of the gradients of layers 0 and 1, 1 and 2, ...; equal on all ranks.

        The gradients are summed over the global batch. Only weights of both layers are compared. The cosine is NaN if a
        gradient is zero or not finite.
        """
        common = [set(a) & set(b) for a, b in zip(self._gradients, self._gradients[1:], strict=False)]
        self._reduce()
        device = next(iter(self._gradients[0].values())).device
        # [dense or experts, pair, (product, square of the first, square of the second)]
        sums = torch.zeros(2, len(common), 3, dtype=torch.float64, device=device)
        for pair, paths in enumerate(common):
            for path in sorted(paths):
                a, b = (self._gradients[layer][path].double() for layer in (pair, pair + 1))
                sums[int(path in self._experts), pair] += torch.stack((a @ b, a @ a, b @ b))
        if self._experts:
            dist.all_reduce(sums[1], group=_group("expert_parallel", self._experts))
        product, first, second = sums.sum(0).unbind(-1)
        return (product / (first * second).sqrt()).tolist()

    def _reduce(self) -> None:
        """Sums the gradients over the ranks with the same weights."""
        for experts in (False, True):
            tensors = [g for layer in self._gradients for p, g in layer.items() if (p in self._experts) == experts]
            if not tensors:
                continue
            flat = torch.cat(tensors)  # one collective for all layers
            dist.all_reduce(flat, group=_group("expert_data_parallel", self._experts) if experts else None)
            for tensor, total in zip(tensors, flat.split([len(t) for t in tensors]), strict=True):
                tensor.copy_(total)

    def _hook(self, handle: Any) -> None:
        self.callback(handle.remove)

    def _sample(self, path: str, parameter: nn.Parameter) -> Tensor:
        """Returns zeros for the sampled elements of a gradient; the first call for a path chooses their indices."""
        numel = full_numel(parameter)
        if path not in self._indices:
            indices = None
            if numel > self._sample_size:
                generator = torch.Generator().manual_seed(numel)  # the same indices for all layers and on all ranks
                indices = torch.randint(numel, (self._sample_size,), generator=generator).to(parameter.device)
            self._indices[path] = indices
        return torch.zeros(min(numel, self._sample_size), device=parameter.device)

    def _enter_block(self, block: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._layer = arguments[_INDEX_ARGUMENT]

    def _leave_block(self, block: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._layer = None

    def _use_views(self, path: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._layer is None or not torch.is_grad_enabled():
            return
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad:
                view = parameter.view_as(parameter)
                view.register_hook(functools.partial(self._keep, self._gradients[self._layer], f"{path}.{name}"))
                self._replaced[module, name] = parameter
                module._parameters[name] = view  # type: ignore[assignment]

    def _use_parameters(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        for name in list(module._parameters):
            if (module, name) in self._replaced:
                module._parameters[name] = self._replaced.pop((module, name))

    def _keep(self, gradients: dict[str, Tensor], path: str, gradient: Tensor) -> None:
        flat, indices, sample = gradient.detach().reshape(-1), self._indices[path], gradients[path]
        # The factor makes the expected norm of the sample equal to the norm of the whole gradient.
        if indices is None:
            sample += flat
        else:
            sample.add_(flat.index_select(0, indices), alpha=(len(flat) / len(indices)) ** 0.5)


@torch.no_grad()
def layer_divergence(model: M6ForConditionalGeneration, sharing: Sharing) -> list[float]:
    """Returns the distance of each layer's weights from the mean over the layers of its Pseudo-phase group.

    Returns:
        for each layer, the norm of the difference divided by the norm of the mean; equal on all ranks.
    """
    layers: list[M6Block] = list(model.model.layers)
    parameters = [dict(layer.named_parameters()) for layer in layers]
    device = next(model.parameters()).device
    # [whole tensors | partitions | local experts, layer, (square of the difference, square of the mean)]
    sums = torch.zeros(3, len(layers), 2, dtype=torch.float64, device=device)
    experts: dict[str, nn.Parameter] = {}
    for first in sorted({sharing.first_layer(layer) for layer in range(len(layers))}):
        group = sharing.group(first)
        for path, parameter in parameters[first].items():
            if len(sharing.real_names(f"layers.{first}.{path}")) == 1:
                continue
            kind = 1 if is_partitioned(parameter) else 0
            if is_expert(parameter):
                kind, experts[path] = 2, parameter
            mean = torch.zeros_like(local_part(parameter), dtype=torch.float32)
            for layer in group:
                mean.add_(local_part(parameters[layer][path]), alpha=1 / len(group))
            for layer in group:
                difference = local_part(parameters[layer][path]).float() - mean
                sums[kind, layer] += torch.stack((difference.square().sum(), mean.square().sum())).double()
    dist.all_reduce(sums[1])
    if experts:
        dist.all_reduce(sums[2], group=_group("expert_parallel", experts))
    difference, mean = sums.sum(0).unbind(-1)
    return (difference / mean).sqrt().tolist()


def _group(kind: GroupKind, experts: dict[str, nn.Parameter]) -> dist.ProcessGroup:
    return named_expert_group(kind, next(iter(experts.values())).group_name)  # type: ignore[attr-defined]
