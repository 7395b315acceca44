"""The layer from and to other libraries' blocks: Hugging Face's Switch, Mixtral and Qwen-MoE, and DeepSpeed's MoE.

Blocks are told apart by their parts, so that neither library is needed to import this. Converted layers and blocks
compute the same outputs where no token is dropped; which tokens a full expert drops, and the noise of routers, are each
library's own.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.layer import MoELayer

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
}


def from_hugging_face(block: nn.Module, **settings: Any) -> MoELayer:
    """A layer with the weights of a block, on its device and in its type.

    The block is a ``SwitchTransformersSparseMLP``, ``MixtralSparseMoeBlock``, ``Qwen2MoeSparseMoeBlock`` or
    ``Qwen3MoeSparseMoeBlock``, or has the same parts, as of transformers 5.23.

    Args:
        settings: further fields of ``MoEConfig``, such as ``aux_loss_weight``. The layer is dropless unless they set a
            capacity; Switch's own is a number of tokens per sequence.

    Raises:
        ValueError: the block is none of these, has a part that the layer does not, such as a shared expert whose width
            is no multiple of the others', or computes other outputs.
    """
    layer = _layer_of_parts(block, **settings)
    _check_outputs(block, layer)
    return layer


def _layer_of_parts(block: nn.Module, **settings: Any) -> MoELayer:
    router, experts = _parts(block)
    if hasattr(experts, "gate_up_proj"):
        config = _glu_config(block, **settings)
        ffn_size = experts.down_proj.shape[2]
        layer = _filled(config, ffn_size, router.weight, experts.gate_up_proj, experts.down_proj)
        _copy([(own, other) for other, own in _shared_pairs(block, layer)])
        return layer
    networks = list(experts.children())
    w_in, w_out = (torch.stack([getattr(each, name).weight for each in networks]) for name in ("wi", "wo"))
    config = _config(len(networks), 1, _function_name(networks[0].act), **settings)
    return _filled(config, w_out.shape[2], router.classifier.weight, w_in, w_out)


def to_hugging_face(layer: MoELayer, block: nn.Module) -> None:
    """Copies the weights into such a block, made from the configuration of its model.

    Raises:
        ValueError: the layer computes what the block cannot, or their sizes differ.
    """
    filled = copy.deepcopy(block)
    _fill_parts(filled, layer)
    _check_outputs(filled, layer)
    block.load_state_dict(filled.state_dict())


def _fill_parts(block: nn.Module, layer: MoELayer) -> None:
    router, experts = _parts(block)
    if hasattr(experts, "gate_up_proj"):
        _check_same(layer, _glu_config(block), type(block).__name__)
        pairs: list[tuple[Any, Any]] = [
            (router.weight, layer.router.weight),
            (experts.gate_up_proj, layer.experts.w_in),
            (experts.down_proj, layer.experts.w_out),
            *_shared_pairs(block, layer),
        ]
    else:
        networks = list(experts.children())
        _check_same(layer, _config(len(networks), 1, _function_name(networks[0].act)), type(block).__name__)
        pairs = [(router.classifier.weight, layer.router.weight)]
        for number, each in enumerate(networks):
            pairs += [(each.wi.weight, layer.experts.w_in[number]), (each.wo.weight, layer.experts.w_out[number])]
    _copy(pairs)


def from_deepspeed(block: nn.Module, **settings: Any) -> MoELayer:
    """A layer with the weights of a ``deepspeed.moe.layer.MoE`` with all experts here, as of DeepSpeed 0.19.8.

    Its experts are two ``nn.Linear`` with an activation module between them, such as ``nn.Sequential(Linear, GELU,
    Linear)``. Its capacities are taken over when it drops tokens.

    Args:
        settings: further fields of ``MoEConfig``.

    Raises:
        ValueError: the block has a part that the layer does not.
    """
    gate, networks = _deepspeed_parts(block)
    (first, second), activation = _two_linear(networks[0])
    capacity = {
        "capacity_factor": gate.capacity_factor,
        "eval_capacity_factor": gate.eval_capacity_factor,
        "min_capacity": gate.min_capacity,
    }
    config = _deepspeed_config(
        gate, len(networks), activation, first, **((capacity if gate.drop_tokens else {}) | settings)
    )
    linears = [_two_linear(network)[0] for network in networks]
    stacks = [torch.stack([pair[i].weight for pair in linears]) for i in (0, 1)]
    biases = [torch.stack([pair[i].bias for pair in linears]) for i in (0, 1)] if config.bias else []
    return _filled(config, second.in_features, gate.wg.weight, *stacks, *biases)


def to_deepspeed(layer: MoELayer, block: nn.Module) -> None:
    """Copies the weights into such a block.

    Raises:
        ValueError: the layer computes what the block cannot, or their sizes differ.
    """
    gate, networks = _deepspeed_parts(block)
    (first, _), activation = _two_linear(networks[0])
    _check_same(layer, _deepspeed_config(gate, len(networks), activation, first), type(block).__name__)
    pairs: list[tuple[Any, Any]] = [(gate.wg.weight, layer.router.weight)]
    for number, network in enumerate(networks):
        linears, _ = _two_linear(network)
        experts = layer.experts
        for linear, weight, bias in zip(
            linears, (experts.w_in, experts.w_out), (experts.b_in, experts.b_out), strict=True
        ):
            pairs.append((linear.weight, weight[number]))
            if bias is not None:
                pairs.append((linear.bias, bias[number]))
    _copy(pairs)


def _config(num_experts: int, top_k: int, activation: str, **settings: Any) -> MoEConfig:
    own: dict[str, Any] = {"num_experts": num_experts, "top_k": top_k, "activation": activation}
    return MoEConfig(**own | settings)


def _glu_config(block: Any, **settings: Any) -> MoEConfig:
    """What a block of gated experts computes as."""
    router, experts = _parts(block)
    if _function_name(experts.act_fn) != "silu":
        raise ValueError(f"the experts' activation is {experts.act_fn}; expected silu, for swiglu")
    num_experts, _, ffn_size = experts.down_proj.shape
    own: dict[str, Any] = {"normalize_gates": bool(getattr(router, "norm_topk_prob", True))}  # Mixtral always does
    shared: Any = getattr(block, "shared_expert", None)
    if shared is not None:
        if _function_name(shared.act_fn) != "silu":
            raise ValueError(f"the shared expert's activation is {shared.act_fn}; expected silu, for swiglu")
        width = shared.down_proj.in_features
        if width == 0 or width % ffn_size:
            raise ValueError(f"the shared expert's width {width} is no multiple of the other experts' {ffn_size}")
        shared_settings = {"num_shared_experts": width // ffn_size, "shared_expert_gate": True}
        for name, value in shared_settings.items():
            if settings.get(name, value) != value:
                raise ValueError(f"{name} is {settings[name]}; expected {value}, as the block has it")
        own |= shared_settings
    return _config(num_experts, router.top_k, "swiglu", **own | settings)


def _shared_pairs(block: Any, layer: MoELayer) -> list[tuple[Any, Any]]:
    """The weights of a block's shared expert, each with the layer's."""
    if layer.shared is None or not hasattr(block, "shared_expert"):
        return []
    gate_rows, value_rows = layer.shared.w_in.detach().chunk(2)
    return [
        (block.shared_expert.gate_proj.weight, gate_rows),
        (block.shared_expert.up_proj.weight, value_rows),
        (block.shared_expert.down_proj.weight, layer.shared.w_out),
        (block.shared_expert_gate.weight, layer.shared.w_gate),
    ]


def _deepspeed_config(gate: Any, num_experts: int, activation: str, first: nn.Linear, **settings: Any) -> MoEConfig:
    own = {"normalize_gates": gate.k > 1, "bias": first.bias is not None}
    return _config(num_experts, gate.k, activation, **own | settings)


def _filled(config: MoEConfig, ffn_size: int, router: Tensor, *weights: Tensor) -> MoELayer:
    """``weights``: w_in, w_out, and with biases b_in, b_out."""
    layer = MoELayer(router.shape[1], ffn_size, config).to(device=router.device, dtype=weights[0].dtype)
    experts = layer.experts
    targets = [experts.w_in, experts.w_out, experts.b_in, experts.b_out][: len(weights)]
    _copy([(layer.router.weight, router), *zip(targets, weights, strict=True)])
    return layer


def _copy(pairs: list[tuple[Any, Any]]) -> None:
    """Copies sources to targets, after all shapes are known to fit."""
    for target, source in pairs:
        if target.shape != source.shape:
            raise ValueError(f"weights of shape {[*source.shape]} do not fit those of shape {[*target.shape]}")
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def _check_same(layer: MoELayer, expected: MoEConfig, block: str) -> None:
    if len(layer.experts.w_in) != layer.config.num_experts:
        raise ValueError(
            f"the layer holds {len(layer.experts.w_in)} of its {layer.config.num_experts} experts; "
            "expected all, without expert parallelism"
        )
    for name in (
        "num_experts",
        "num_prototypes",
        "top_k",
        "routing",
        "gating",
        "normalize_gates",
        "activation",
        "bias",
        "num_shared_experts",
        "shared_expert_gate",
    ):
        own, other = getattr(layer.config, name), getattr(expected, name)
        if own != other:
            raise ValueError(f"the layer's {name} is {own!r}; {block} computes as with {other!r}")


def _parts(block: nn.Module) -> tuple[Any, Any]:
    """Router and experts of a block of Hugging Face's.

    Raises:
        ValueError: it is none that is known, or has a part without counterpart.
    """
    router = getattr(block, "gate", None) or getattr(block, "router", None)
    experts: Any = getattr(block, "experts", nn.Module())
    glu = hasattr(experts, "gate_up_proj") and hasattr(router, "top_k")
    switch = hasattr(router, "classifier") and all(hasattr(each, "wi") for each in experts.children())
    if not glu and not switch:
        raise ValueError(
            f"{type(block).__name__} is no block that can be converted; expected the parts of "
            "SwitchTransformersSparseMLP, MixtralSparseMoeBlock, Qwen2MoeSparseMoeBlock or Qwen3MoeSparseMoeBlock"
        )
    gated = glu and hasattr(block, "shared_expert_gate")
    for name in ("shared_experts",) if gated else ("shared_expert", "shared_experts"):
        if hasattr(block, name):
            raise ValueError(
                f"{type(block).__name__} has a {name} without the gate of Qwen2-MoE's; "
                "convert a block without it, and add its output"
            )
    biased = [name for name, parameter in block.named_parameters() if name.endswith("bias")]
    if biased:
        raise ValueError(f"{type(block).__name__} has the bias {biased[0]}, for which the layer has no place")
    buffers = [name for name, _ in block.named_buffers()]
    if buffers:
        raise ValueError(f"{type(block).__name__} has the buffer {buffers[0]}, for which the layer has no place")
    return router, experts


def _check_outputs(block: nn.Module, layer: MoELayer) -> None:
    """Compares what a block of Hugging Face's and the layer compute: parts of one name differ from router to router.

    Copies in float32 meet 32 random tokens, without dropout and noise; each is a sequence, from which nothing is
    dropped. 1e-3 of the largest output leaves room for TF32, and is far below what another gating changes. Nothing is
    compared on the meta device.

    Raises:
        ValueError: the outputs differ.
    """
    weight = layer.router.weight.detach()
    if weight.is_meta:
        return
    tokens = torch.randn(32, 1, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device)
    tokens *= 2 / (tokens @ weight.float().T).std().clamp(min=1e-6)  # small logits would hide a router's formula
    dropless = copy.deepcopy(layer).float().eval()
    dropless.config = dataclasses.replace(layer.config, routing="token_choice", eval_capacity_factor=None)
    with torch.no_grad():
        own = dropless(tokens).hidden_states
        del dropless
        found = copy.deepcopy(block).float().eval()(tokens.clone().to(next(block.parameters()).device))
    found = (found[0] if isinstance(found, tuple) else found).to(own.device)
    largest, difference = found.abs().max().item(), (found - own).abs().max().item()
    if not difference <= 1e-3 * largest:
        raise ValueError(
            f"{type(block).__name__} computes other outputs than the layer with its weights, by {difference:.2g} where "
            f"the largest is {largest:.2g}; expected softmax gates, without further factors, and experts as in "
            "SwitchTransformersSparseMLP, MixtralSparseMoeBlock, Qwen2MoeSparseMoeBlock or Qwen3MoeSparseMoeBlock"
        )


def _deepspeed_parts(block: nn.Module) -> tuple[Any, list[nn.Module]]:
    moe = getattr(block, "deepspeed_moe", None)
    if moe is None:
        raise ValueError(f"{type(block).__name__} is no deepspeed.moe.layer.MoE")
    if getattr(block, "use_residual", False):
        raise ValueError("the MoE has use_residual; expected a block without, whose output can be added")
    networks = list(moe.experts.deepspeed_experts)
    if len(networks) != moe.gate.wg.out_features:
        raise ValueError(f"the MoE holds {len(networks)} of {moe.gate.wg.out_features} experts; expected ep_size 1")
    return moe.gate, networks


def _two_linear(network: nn.Module) -> tuple[tuple[nn.Linear, nn.Linear], str]:
    """The two matrices of an expert, and the name of its activation."""
    leaves = [module for module in network.modules() if not list(module.children())]
    linears = [leaf for leaf in leaves if isinstance(leaf, nn.Linear)]
    others = [leaf for leaf in leaves if not isinstance(leaf, (nn.Linear, nn.Dropout, nn.Identity))]
    if len(linears) != 2 or len(others) != 1 or (linears[0].bias is None) != (linears[1].bias is None):
        raise ValueError(
            f"an expert has the modules {[type(leaf).__name__ for leaf in leaves]}; "
            "expected two Linear, both with bias or both without, and one activation"
        )
    return (linears[0], linears[1]), _function_name(others[0])


def _function_name(function: Callable[[Tensor], Tensor]) -> str:
    """The activation's name, found by what it computes: libraries have several classes for the same one."""
    probe = torch.linspace(-4, 4, 65)
    values = function(probe)
    for name, known in _FUNCTIONS.items():
        if torch.allclose(values, known(probe), rtol=0, atol=1e-6):
            return name
    raise ValueError(f"the activation {function} is none of {', '.join(_FUNCTIONS)}")
