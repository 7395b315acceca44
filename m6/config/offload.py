"""The section ``m6.offload``: what it may say, and what of it cannot be done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from m6.config.deepspeed import DeepSpeedSettings, Rate, split_deepspeed
from m6.errors import UserError
from m6.model.configuration import M6Config
from m6.validation import Section

Kind = Literal["expert", "attention", "ffn", "norm", "router", "embedding"]
TensorKind = Literal["parameter", "gradient", "optimizer_state", "activation"]
Place = Literal["device", "stream", "host", "auto"]
Mib = Annotated[float, Field(gt=0)]
_HOST = {"device": "cpu", "pin_memory": True}
_STORED: tuple[TensorKind, ...] = ("parameter", "gradient", "optimizer_state")


class OffloadRule(Section):
    """Where something lies. Of rules that name the same, the last one counts."""

    layers: str | None = Field(None, description='layers by number from 0, as "0-11,14"; absent: all')
    kind: Kind | None = Field(None, description="part of the model; absent: every part")
    tensor: TensorKind | None = Field(
        None, description="what of it; absent: its parameters, gradients and optimizer state"
    )
    place: Place = Field(
        description="device: it is owned by the device, and nothing of it moves; stream: it lives on the host and may "
        "stay on the device from one use to another; host: it leaves the device before others are used; auto: as is "
        "planned. Activations are on the device without a rule; host: they wait for the backward pass on the host; "
        "auto: so where no plan fits otherwise"
    )


class OffloadOptimizer(Section):
    """The optimizer of the experts, where it is another one than that of the rest. It keeps one row and one column of
    second moments per matrix (Adafactor), two moments (AdamW), or a momentum (SGD)."""

    type: Literal["AdamW", "Adafactor", "SGD"] = Field(description="which")
    lr: float = Field(gt=0, description="learning rate at its peak; it follows m6.schedule as the other one does")
    weight_decay: float = Field(0.0, ge=0, description="decoupled; of matrices, not of biases")
    betas: tuple[Rate, Rate] = Field((0.9, 0.999), description="AdamW's")
    eps: float = Field(1e-8, gt=0, description="AdamW's")
    beta2_decay: float = Field(-0.8, le=0, description="Adafactor's")
    clipping_threshold: float = Field(1.0, ge=1, description="Adafactor's")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD's")

    def check(self) -> None:
        """Raises UserError for a key that is another optimizer's."""
        keys = {"AdamW": {"betas", "eps"}, "Adafactor": {"beta2_decay", "clipping_threshold"}, "SGD": {"momentum"}}
        for key in sorted(self.model_fields_set - {"type", "lr", "weight_decay"} - keys[self.type]):
            owner = next(name for name, own in keys.items() if key in own)
            raise UserError(f"m6.offload.optimizer.{key}: {self.type} would ignore it; it belongs to {owner}")


class OffloadSettings(Section):
    """Experts in host memory that stream through a byte budget (M6-10T's granular CPU offloading). The results do not
    depend on budgets, rules, sizes and threads. Without a GPU the device is a simulated one."""

    policy: Literal["auto", "deepspeed"] = Field(
        "auto",
        description="deepspeed: DeepSpeed's own offload instead (optimizer state to the host at ZeRO stages 1 to 3, "
        "parameters too at 3, all or nothing); then no other key of this section is accepted",
    )
    device_budget_mib: Mib | Literal["auto"] = Field(
        "auto",
        description="what this rank's whole model may occupy on the device, activations, gradients and copies in "
        "flight included; auto: 95 % of what is free there (a GPU)",
    )
    host_budget_mib: Mib | Literal["auto"] = Field(
        "auto",
        description="what this rank's experts, and activations that wait there, may occupy on the host; auto: its "
        "share of 95 % of what is available. More than is available is an error before the training starts",
    )
    chunk_mib: Mib | Literal["auto"] = Field(
        64.0,
        description="the most that one copy moves: as many whole experts of a layer as fit, at least one; auto: the "
        "size whose plan spends the least time on copies",
    )
    prefetch_depth: int = Field(1, ge=0, description="chunks that are on their way to the device ahead of their use")
    num_threads: PositiveInt = Field(1, description="threads of the host that update experts")
    rules: list[OffloadRule] = Field([], description="where what lies, as far as that is not left to the plan")
    optimizer: OffloadOptimizer | None = Field(None, description="that of the experts; absent: as of the rest")
    split_master: bool = Field(
        True,
        description="keep of a bfloat16 weight's fp32 master the lower half alone, 2 bytes instead of 4; equal to the "
        "bit",
    )
    update: Literal["next_forward", "backward"] = Field(
        "next_forward",
        description="when the host updates experts. next_forward: when the norm of all gradients is known, during the "
        "next forward pass; backward: as soon as an expert's gradient is there, so that no memory holds gradients (2 "
        "bytes a parameter less). It needs gradient_clipping 0, one micro-batch a step and no fp16, and ends the run "
        "at a gradient that is not finite instead of skipping the step",
    )


Part = tuple[Kind, int | None]
"""A kind of module and its layer; None outside of layers."""


@dataclass(frozen=True)
class ActivationPlaces:
    """What of the model keeps its activations on the host, and what does so where no plan fits otherwise."""

    host: frozenset[Part]
    auto: frozenset[Part]


@dataclass(frozen=True)
class ExpertPlaces:
    """Layers whose experts are not left to the plan; see ``offload.Wishes``."""

    owned: frozenset[int]
    streamed: frozenset[int]
    fetched: frozenset[int]


def check_offload(
    settings: OffloadSettings,
    deepspeed: DeepSpeedSettings,
    model: M6Config,
    pseudo_switch: str | None,
    checkpointing: bool,
) -> DeepSpeedSettings:
    """Raises UserError for what cannot be done; returns DeepSpeed's settings, with its offload where that is asked for.

    Args:
        pseudo_switch: the rule by which the Pseudo stage ends, if there is one.
        checkpointing: whether layers keep their inputs alone for the backward pass.
    """
    if settings.policy == "deepspeed":
        return _with_deepspeeds_own(settings, deepspeed)
    reason = ""
    if model.moe is None:
        reason = (
            "only experts are offloaded, but the model is dense; add m6.moe, leave m6.offload out, or use "
            '"policy": "deepspeed"'
        )
    elif model.moe_attention:
        reason = "the experts on attention of m6.model.moe_attention cannot be offloaded; leave one of the two out"
    elif deepspeed.zero_stage == 3:
        reason = "it needs zero_optimization.stage 0, 1 or 2 for the other parameters, found 3"
    elif deepspeed.keys.get("torch_autocast", {}).get("enabled"):
        reason = "experts are kept in the precision they compute in: use bf16 instead of torch_autocast"
    elif pseudo_switch == "gradient_correlation":
        reason = (
            "the gradients of offloaded experts cannot be compared between layers: use another "
            "m6.pseudo_to_real.switch than gradient_correlation"
        )
    elif settings.update == "backward" and deepspeed.gradient_clipping:
        reason = '"update": "backward" does not wait for the norm that gradient_clipping needs; set that to 0'
    elif settings.update == "backward" and deepspeed.precision == "fp16":
        reason = '"update": "backward" cannot skip the steps by which fp16 finds its loss scale; use bf16'
    elif settings.update == "backward" and pseudo_switch is not None:
        reason = '"update": "backward" needs one gradient of an expert a step, and shared layers bring several'
    if reason:
        raise UserError(f"m6.offload: {reason}")
    if settings.optimizer is not None:
        settings.optimizer.check()
    deepspeed = _with_dense_states(settings.rules, model, deepspeed)
    resolve_rules(settings.rules, model, dense_states_on_host=offloads_states(deepspeed))
    resolve_activation_rules(settings.rules, model, checkpointing)
    return deepspeed


def offloads_states(deepspeed: DeepSpeedSettings) -> bool:
    """Whether DeepSpeed keeps optimizer state on the host."""
    section = deepspeed.keys.get("zero_optimization", {}).get("offload_optimizer") or {}
    return section.get("device", "none") != "none"


def _with_dense_states(rules: list[OffloadRule], model: M6Config, deepspeed: DeepSpeedSettings) -> DeepSpeedSettings:
    """DeepSpeed's settings, with its offload of the optimizer where rules take all optimizer state to the host."""
    dense = {(kind, layer) for kind, layer in _parts(model) if kind != "expert"}
    named = {
        (kind, layer)
        for (kind, layer, tensor), (_, place) in _match(rules, model).items()
        if tensor == "optimizer_state" and place == "host"
    }
    if not dense & named or offloads_states(deepspeed):
        return deepspeed
    if dense - named:
        missing = ", ".join(sorted({kind for kind, _ in dense - named}))
        raise UserError(
            "m6.offload.rules: the optimizer state of all but experts is DeepSpeed's, which takes all of it to the "
            f"host or none: name every layer of {missing}, too, or none of the dense kinds"
        )
    if deepspeed.zero_stage == 0:
        raise UserError(
            "m6.offload.rules: DeepSpeed takes optimizer state to the host at zero_optimization.stage 1 or 2, found 0"
        )
    section = {**deepspeed.keys["zero_optimization"], "offload_optimizer": _HOST}
    return split_deepspeed({**deepspeed.keys, "zero_optimization": section})


def _with_deepspeeds_own(settings: OffloadSettings, deepspeed: DeepSpeedSettings) -> DeepSpeedSettings:
    for key in sorted(settings.model_fields_set - {"policy"}):
        raise UserError(f'm6.offload.{key}: "policy": "deepspeed" would ignore it; leave it out, or the policy')
    section: dict[str, Any] = deepspeed.keys.get("zero_optimization", {})
    if deepspeed.zero_stage == 0:
        raise UserError('m6.offload: "policy": "deepspeed" needs zero_optimization.stage 1, 2 or 3, found 0')
    for key in ("offload_optimizer", "offload_param"):
        if key in section:
            raise UserError(f'zero_optimization.{key}: m6.offload with "policy": "deepspeed" sets it; keep one of both')
    own = {"offload_optimizer": _HOST, **({"offload_param": _HOST} if deepspeed.zero_stage == 3 else {})}
    return split_deepspeed({**deepspeed.keys, "zero_optimization": {**section, **own}})


def resolve_rules(rules: list[OffloadRule], model: M6Config, dense_states_on_host: bool = False) -> ExpertPlaces:
    """Which layers' experts go where.

    Raises:
        UserError: a rule matches nothing, asks for what cannot be done, or contradicts another one.
    """
    places = _match(rules, model)
    for (kind, _, tensor), (index, place) in places.items():
        _check_possible(f"m6.offload.rules.{index}", kind, tensor, place, dense_states_on_host)
    found: dict[str, set[int]] = {"owned": set(), "streamed": set(), "fetched": set()}
    for layer in [layer for kind, layer in _parts(model) if kind == "expert" and layer is not None]:
        own = {tensor: places.get(("expert", layer, tensor), (-1, "auto")) for tensor in _STORED}
        on_device = [index for index, place in own.values() if place == "device"]
        off_device = [index for index, place in own.values() if place in ("stream", "host")]
        if on_device and off_device:
            raise UserError(
                f"m6.offload.rules.{off_device[0]} contradicts m6.offload.rules.{on_device[0]} in layer {layer}: what "
                "the device owns of an expert it owns with its gradient and optimizer state"
            )
        if own["parameter"][1] == "host":
            found["fetched"].add(layer)
        elif off_device:
            found["streamed"].add(layer)
        elif on_device:
            found["owned"].add(layer)
    return ExpertPlaces(*(frozenset(found[name]) for name in ("owned", "streamed", "fetched")))


def resolve_activation_rules(rules: list[OffloadRule], model: M6Config, checkpointing: bool) -> ActivationPlaces:
    """Where autograd keeps what it saves.

    Raises:
        UserError: as ``resolve_rules``; also for a kind whose activations are computed anew.
    """
    found: dict[Place, set[Part]] = {"host": set(), "auto": set()}
    for (kind, layer, tensor), (index, place) in _match(rules, model).items():
        if tensor != "activation":
            continue
        where = f"m6.offload.rules.{index}"
        if place == "stream":
            raise UserError(f'{where}: activations wait for the backward pass; "place" has to be device, host or auto')
        if checkpointing and layer is not None and rules[index].kind is not None:
            raise UserError(
                f"{where}: under m6.training.activation_checkpointing a layer keeps its input alone, which is of no "
                "kind; leave kind out"
            )
        if place != "device":
            found[place].add((kind, layer))
    return ActivationPlaces(frozenset(found["host"]), frozenset(found["auto"]))


def _match(rules: list[OffloadRule], model: M6Config) -> dict[tuple[Kind, int | None, TensorKind], tuple[int, Place]]:
    """What the last rule that names a part's tensors says, and that rule's number."""
    parts = list(_parts(model))
    places: dict[tuple[Kind, int | None, TensorKind], tuple[int, Place]] = {}
    for index, rule in enumerate(rules):
        where = f"m6.offload.rules.{index}"
        layers = None if rule.layers is None else _parse_layers(rule.layers, where)
        matched = [
            (kind, layer)
            for kind, layer in parts
            if rule.kind in (None, kind) and (layers is None or (layer is not None and layer in layers))
        ]
        if not matched:
            raise UserError(f"{where}: {_nothing(rule, layers, parts, model.num_layers)}")
        for kind, layer in matched:
            for tensor in _STORED if rule.tensor is None else (rule.tensor,):
                places[kind, layer, tensor] = (index, rule.place)
    return places


def _parts(model: M6Config) -> Iterator[Part]:
    """Every part of the model with its layer."""
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


def _parse_layers(text: str, where: str) -> set[int]:
    layers: set[int] = set()
    for part in text.split(","):
        begin, dash, end = part.strip().partition("-")
        if not begin.isdigit() or (dash and not end.isdigit()) or (dash and int(end) < int(begin)):
            raise UserError(f'{where}.layers: expected numbers and ranges as "0-11,14", found {text!r}')
        layers.update(range(int(begin), int(end if dash else begin) + 1))
    return layers


def _nothing(rule: OffloadRule, layers: set[int] | None, parts: list[Part], num_layers: int) -> str:
    kinds = {kind for kind, _ in parts}
    if rule.kind is not None and rule.kind not in kinds:
        return f"matches nothing: the model has no {rule.kind}; it has {', '.join(sorted(kinds))}"
    assert layers is not None
    candidates = [layer for kind, layer in parts if rule.kind in (None, kind) and layer is not None]
    if not candidates:
        return f"matches nothing: {rule.kind} is outside of the layers; leave layers out"
    nearest = min(candidates, key=lambda layer: min(abs(layer - other) for other in layers))
    what = "of the model" if rule.kind is None else f"with {rule.kind}"
    return (
        f"matches nothing: no layer {what} is in {rule.layers!r}; the nearest is {nearest} (of 0 to {num_layers - 1})"
    )


def _check_possible(where: str, kind: Kind, tensor: TensorKind, place: Place, dense_states_on_host: bool) -> None:
    if kind == "expert" or tensor == "activation":
        return
    done = tensor == "optimizer_state" and place == "host" and dense_states_on_host
    if place in ("stream", "host") and not done:
        raise UserError(
            f'{where}: {kind} is in DeepSpeed\'s engine, and only experts leave the device by rules: add "kind": '
            '"expert"; of all other parameters the optimizer state can go, by {"tensor": "optimizer_state", "place": '
            '"host"} for all of them'
        )
    if place == "device" and tensor == "optimizer_state" and dense_states_on_host:
        raise UserError(f"{where}: contradicts zero_optimization.offload_optimizer, which takes {kind} to the host")
