"""Resolves ``m6.offload.rules``: finds the parts of a model that each rule matches, and checks the places."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from m6.architecture.settings import ModelSettings
from m6.config.offload import STORED_TENSORS, ModuleKind, OffloadRule, Place, TensorKind
from m6.errors import UserError

LayerModule = tuple[ModuleKind, int | None]
"""A kind of module and the number of its layer; None outside of layers."""


@dataclass(frozen=True)
class ActivationPlaces:
    """Parts of the model whose activations may be offloaded.

    Attributes:
        host: activations are on the host until the backward pass.
        auto: activations are on the host only if no other plan fits.
    """

    host: frozenset[LayerModule]
    auto: frozenset[LayerModule]


@dataclass(frozen=True)
class ExpertPlaces:
    """Layers whose experts have a place by a rule; see ``offload.PlacementConstraints``.

    Attributes:
        owned: the device holds the experts with their gradients and optimizer state.
        streamed: the host holds them; copies may stay on the device between uses.
        fetched: the host holds them; copies leave the device after each use.
    """

    owned: frozenset[int]
    streamed: frozenset[int]
    fetched: frozenset[int]


def resolve_rules(rules: list[OffloadRule], model: ModelSettings, dense_states_on_host: bool = False) -> ExpertPlaces:
    """Resolves the places of experts, by layer.

    Args:
        dense_states_on_host: whether DeepSpeed keeps its optimizer state on the host.

    Raises:
        UserError: a rule matches nothing, is impossible, or contradicts another rule.
    """
    places = match_rules(rules, model)
    for (kind, _, tensor), (index, place) in places.items():
        _check_possible(f"m6.offload.rules.{index}", kind, tensor, place, dense_states_on_host)
    layers: dict[str, set[int]] = {"owned": set(), "streamed": set(), "fetched": set()}
    for layer in [layer for kind, layer in layer_modules(model) if kind == "expert" and layer is not None]:
        # -1: no rule names the tensor.
        placed = {tensor: places.get(("expert", layer, tensor), (-1, "auto")) for tensor in STORED_TENSORS}
        on_device = [index for index, place in placed.values() if place == "device"]
        off_device = [index for index, place in placed.values() if place in ("stream", "host")]
        if on_device and off_device:
            raise UserError(
                f"m6.offload.rules.{off_device[0]} contradicts m6.offload.rules.{on_device[0]} in layer {layer}: the "
                "device holds an expert only together with its gradient and optimizer state"
            )
        if placed["parameter"][1] == "host":
            layers["fetched"].add(layer)
        elif off_device:
            layers["streamed"].add(layer)
        elif on_device:
            layers["owned"].add(layer)
    return ExpertPlaces(*(frozenset(layers[name]) for name in ("owned", "streamed", "fetched")))


def resolve_activation_rules(rules: list[OffloadRule], model: ModelSettings, checkpointing: bool) -> ActivationPlaces:
    """Resolves the places of activations.

    Raises:
        UserError: as in ``resolve_rules``; or a rule names a kind whose activations are recomputed.
    """
    places: dict[Place, set[LayerModule]] = {"host": set(), "auto": set()}
    for (kind, layer, tensor), (index, place) in match_rules(rules, model).items():
        if tensor != "activation":
            continue
        rule_key = f"m6.offload.rules.{index}"
        if place == "stream":
            raise UserError(f'{rule_key}: "stream" is for weights; the "place" of activations is device, host or auto')
        if checkpointing and layer is not None and rules[index].kind is not None:
            raise UserError(
                f"{rule_key}: under m6.training.activation_checkpointing a layer keeps only its input, which belongs "
                "to no kind; leave kind out"
            )
        if place != "device":
            places[place].add((kind, layer))
    return ActivationPlaces(frozenset(places["host"]), frozenset(places["auto"]))


def match_rules(
    rules: list[OffloadRule], model: ModelSettings
) -> dict[tuple[ModuleKind, int | None, TensorKind], tuple[int, Place]]:
    """For each matched (kind, layer, tensor): the number of the last matching rule, and its place."""
    parts = list(layer_modules(model))
    places: dict[tuple[ModuleKind, int | None, TensorKind], tuple[int, Place]] = {}
    for index, rule in enumerate(rules):
        rule_key = f"m6.offload.rules.{index}"
        layers = None if rule.layers is None else _parse_layers(rule.layers, rule_key)
        matched = [
            (kind, layer)
            for kind, layer in parts
            if rule.kind in (None, kind) and (layers is None or (layer is not None and layer in layers))
        ]
        if not matched:
            raise UserError(f"{rule_key}: {_explain_no_match(rule, layers, parts, model.num_layers)}")
        for kind, layer in matched:
            for tensor in STORED_TENSORS if rule.tensor is None else (rule.tensor,):
                places[kind, layer, tensor] = (index, rule.place)
    return places


def layer_modules(model: ModelSettings) -> Iterator[LayerModule]:
    """Yields every kind of module of every layer of the model."""
    yield "embedding", None
    moe = model.moe_config() if model.moe is not None else None
    for layer in range(model.num_layers):
        yield "attention", layer
        yield "norm", layer
        if moe is not None and model.is_moe_layer(layer):
            yield "expert", layer
            yield "router", layer
        if moe is None or not model.is_moe_layer(layer) or moe.num_shared_experts:
            yield "ffn", layer


def _parse_layers(text: str, rule_key: str) -> set[int]:
    layers: set[int] = set()
    for part in text.split(","):
        begin, dash, end = part.strip().partition("-")
        numbers = [begin, end] if dash else [begin]
        # Of few digits: a range of 10^12 layers would fill the memory.
        if not all(re.fullmatch("[0-9]{1,5}", number) for number in numbers) or int(numbers[-1]) < int(begin):
            raise UserError(f'{rule_key}.layers: expected numbers and ranges such as "0-11,14", found {text!r}')
        layers.update(range(int(begin), int(end if dash else begin) + 1))
    return layers


def _explain_no_match(rule: OffloadRule, layers: set[int] | None, parts: list[LayerModule], num_layers: int) -> str:
    kinds = {kind for kind, _ in parts}
    if rule.kind is not None and rule.kind not in kinds:
        return f"matches nothing: the model has no {rule.kind}; it has {', '.join(sorted(kinds))}"
    assert layers is not None
    candidates = [layer for kind, layer in parts if rule.kind in (None, kind) and layer is not None]
    if not candidates:
        return f"matches nothing: {rule.kind} is outside of the layers; leave layers out"
    nearest = min(candidates, key=lambda layer: min(abs(layer - named) for named in layers))
    scope = "of the model" if rule.kind is None else f"with {rule.kind}"
    return (
        f"matches nothing: no layer {scope} is in {rule.layers!r}; the nearest is {nearest} (of 0 to {num_layers - 1})"
    )


def _check_possible(
    rule_key: str, kind: ModuleKind, tensor: TensorKind, place: Place, dense_states_on_host: bool
) -> None:
    if kind == "expert" or tensor == "activation":
        return
    # DeepSpeed offloads the optimizer state of everything but experts; apply_offload has turned that on.
    done = tensor == "optimizer_state" and place == "host" and dense_states_on_host
    if place in ("stream", "host") and not done:
        raise UserError(
            f'{rule_key}: DeepSpeed\'s engine holds {kind}, and rules can only offload experts: add "kind": "expert". '
            'Of the other parameters only the optimizer state can be offloaded, by {"tensor": "optimizer_state", '
            '"place": "host"} for all of them'
        )
    if place == "device" and tensor == "optimizer_state" and dense_states_on_host:
        raise UserError(
            f"{rule_key}: contradicts zero_optimization.offload_optimizer, which offloads the state of {kind}"
        )
