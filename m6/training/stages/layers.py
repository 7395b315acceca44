"""How much the layers of a model agree: in their gradients, and in their weights after delinking."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.model.modeling import M6Block, M6ForConditionalGeneration
from m6.model.sharing import Sharing
from m6.training.engine.partitions import full_numel, is_expert, is_partitioned, local_part
from m6.training.expert_groups import GroupKind, named_expert_group

SAMPLE_SIZE = 1 << 16
_INDEX_ARGUMENT = 3  # of M6Block.forward


class LayerGradients(contextlib.ExitStack):
    """Collects, inside ``with``, the gradient of every layer's own use of its weights, shared or not.

    Each use gets a view of the weight, whose gradient is that use's; autograd adds them up as it would without
    views, so the training step is the same. Kept are all elements of a tensor of up to ``SAMPLE_SIZE`` elements, and
    as many at fixed random places of a larger one (with which the correlation is an estimate), in fp32: memory that
    does not grow with the model's width. Works under any ZeRO stage and under activation checkpointing.
    """

    def __init__(self, model: M6ForConditionalGeneration, sample_size: int = SAMPLE_SIZE) -> None:
        super().__init__()
        self._blocks: list[M6Block] = list(model.model.layers)
        self._sample_size = sample_size
        self._layer: int | None = None  # whose forward pass is under way; None while it is computed anew
        self._gradients: list[dict[str, Tensor]] = []
        self._places: dict[str, Tensor | None] = {}
        self._experts: dict[str, nn.Parameter] = {}
        self._own: dict[tuple[nn.Module, str], nn.Parameter] = {}

    def __enter__(self) -> LayerGradients:
        super().__enter__()
        seen: set[nn.Module] = set()
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
                if module not in seen and next(module.parameters(recurse=False), None) is not None:
                    seen.add(module)
                    self._hook(module.register_forward_pre_hook(functools.partial(self._use_views, path)))
                    # First, since ZeRO stage 3 looks for its own parameters afterwards.
                    self._hook(module.register_forward_hook(self._use_parameters, prepend=True, always_call=True))
        return self

    def correlations(self) -> list[float]:
        """The cosine of the angle between the gradients of layers 0 and 1, 1 and 2, ...; equal on all ranks.

        The gradients are those of the global batch. Where one layer has a mixture of experts and the next has not,
        what both have is compared. NaN if a gradient is zero or not finite.
        """
        common = [set(a) & set(b) for a, b in zip(self._gradients, self._gradients[1:], strict=False)]
        self._add_up()
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

    def _add_up(self) -> None:
        """Over the ranks that computed gradients of the same weights."""
        for experts in (False, True):
            tensors = [g for layer in self._gradients for p, g in layer.items() if (p in self._experts) == experts]
            if not tensors:
                continue
            flat = torch.cat(tensors)
            dist.all_reduce(flat, group=_group("expert_data_parallel", self._experts) if experts else None)
            for tensor, total in zip(tensors, flat.split([len(t) for t in tensors]), strict=True):
                tensor.copy_(total)

    def _hook(self, handle: Any) -> None:
        self.callback(handle.remove)

    def _sample(self, path: str, parameter: nn.Parameter) -> Tensor:
        """Zeros for the kept elements of a gradient; chooses which these are."""
        numel = full_numel(parameter)
        if path not in self._places:
            places = None
            if numel > self._sample_size:
                generator = torch.Generator().manual_seed(numel)  # the same places for all layers and on all ranks
                places = torch.randint(numel, (self._sample_size,), generator=generator).to(parameter.device)
            self._places[path] = places
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
                self._own[module, name] = parameter
                module._parameters[name] = view  # type: ignore[assignment]

    def _use_parameters(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        for name in list(module._parameters):
            if (module, name) in self._own:
                module._parameters[name] = self._own.pop((module, name))

    def _keep(self, gradients: dict[str, Tensor], path: str, gradient: Tensor) -> None:
        flat, places, kept = gradient.detach().reshape(-1), self._places[path], gradients[path]
        if places is None:
            kept += flat
        else:
            kept.add_(flat.index_select(0, places), alpha=(len(flat) / len(places)) ** 0.5)


@torch.no_grad()
def layer_divergence(model: M6ForConditionalGeneration, sharing: Sharing) -> list[float]:
    """How far each layer's weights have gone from the mean of the layers that it once shared them with.

    Returns:
        for each layer the norm of the difference over the norm of the mean; equal on all ranks.
    """
    layers: list[M6Block] = list(model.model.layers)
    parameters = [dict(layer.named_parameters()) for layer in layers]
    device = next(model.parameters()).device
    # [whole or a part on this rank or local experts, layer, (square of the difference, square of the mean)]
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
