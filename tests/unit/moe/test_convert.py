"""Converted layers compute what the blocks of other libraries compute, both ways.

Tolerance 1e-6 in float32 on outputs near 1: products are summed in another order.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from moe import MoEConfig, MoELayer
from moe.convert import from_deepspeed, from_hugging_face, to_deepspeed, to_hugging_face

HIDDEN, FFN, EXPERTS = 16, 24, 6
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def fill(block: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
    return block.eval()


def switch(**changes: object) -> nn.Module:
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    settings = {"d_model": HIDDEN, "d_ff": FFN, "num_experts": EXPERTS, "expert_capacity": 64, "dense_act_fn": "relu"}
    return fill(SwitchTransformersSparseMLP(SwitchTransformersConfig(**settings | changes)))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=2, hidden_act="silu"
    )
    return fill(MixtralSparseMoeBlock(config))


def qwen3(norm_topk_prob: bool) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=FFN,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        norm_topk_prob=norm_topk_prob,
    )
    return fill(Qwen3MoeSparseMoeBlock(config))


def qwen2(**changes: object) -> nn.Module:
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    sizes = {"moe_intermediate_size": FFN, "shared_expert_intermediate_size": 2 * FFN, "num_experts": EXPERTS}
    return fill(Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(hidden_size=HIDDEN, **sizes | changes)))


def qwen3_next() -> nn.Module:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    sizes = {"moe_intermediate_size": FFN, "shared_expert_intermediate_size": FFN, "num_experts": EXPERTS}
    return fill(Qwen3NextSparseMoeBlock(Qwen3NextConfig(hidden_size=HIDDEN, num_experts_per_tok=2, **sizes)))


BLOCKS = {
    "switch relu": switch,
    "switch gelu": lambda: switch(dense_act_fn="gelu"),
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen2 normalised": lambda: qwen2(norm_topk_prob=True, shared_expert_intermediate_size=FFN),
    "qwen3": lambda: qwen3(False),
    "qwen3 normalised": lambda: qwen3(True),
    "qwen3-next": qwen3_next,
}


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 30, HIDDEN)


@pytest.mark.parametrize("name", BLOCKS)
def test_hugging_face_both_ways(name: str) -> None:
    block = BLOCKS[name]()
    layer = from_hugging_face(block, aux_loss_weight=0.5).eval()
    assert layer.config.aux_loss_weight == 0.5
    x = inputs()
    expected = block(x)
    torch.testing.assert_close(layer(x).hidden_states, expected, **CLOSE)
    assert expected.abs().mean() > 0.05

    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    to_hugging_face(layer, block)
    torch.testing.assert_close(block(x), layer(x).hidden_states, **CLOSE)
    assert not torch.allclose(block(x), expected, atol=0.01)
    again = from_hugging_face(block)
    for key, value in again.state_dict().items():
        assert torch.equal(value, layer.state_dict()[key])


@pytest.mark.parametrize("make", [mixtral, switch])
def test_data_type_and_gradients_are_kept(make) -> None:
    block = make().bfloat16().train()
    before = copy.deepcopy(block)
    layer = from_hugging_face(block)
    assert all(module.training for module in block.modules())
    for parameter, was in zip(block.parameters(), before.parameters(), strict=True):
        assert parameter.dtype == was.dtype
        assert torch.equal(parameter, was)
    assert layer.experts.w_in.dtype == torch.bfloat16
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in layer.parameters())
    layer(inputs().bfloat16()).hidden_states.sum().backward()
    assert all(parameter.grad is None for parameter in block.parameters())


def deepspeed_block(k: int, bias: bool, activation: nn.Module, **changes: object) -> nn.Module:
    from deepspeed.moe.layer import MoE

    expert = nn.Sequential(nn.Linear(HIDDEN, FFN, bias=bias), activation, nn.Linear(FFN, HIDDEN, bias=bias))
    settings = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
    return fill(MoE(HIDDEN, expert, num_experts=EXPERTS, k=k, **settings | changes))


@pytest.mark.parametrize(
    ("k", "bias", "activation"),
    [(1, True, nn.GELU()), (1, False, nn.ReLU()), (2, True, nn.ReLU()), (3, False, nn.GELU())],
)
def test_deepspeed_both_ways(k: int, bias: bool, activation: nn.Module) -> None:
    block = deepspeed_block(k, bias, activation)
    layer = from_deepspeed(block).eval()
    x = inputs()
    torch.testing.assert_close(layer(x).hidden_states, block(x)[0], **CLOSE)
    assert layer(x).stats.expert_counts.tolist() == block(x)[2].tolist()

    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    to_deepspeed(layer, block)
    torch.testing.assert_close(block(x)[0], layer(x).hidden_states, **CLOSE)
    for key, value in from_deepspeed(block).state_dict().items():
        assert torch.equal(value, layer.state_dict()[key])


def test_deepspeed_capacities_are_taken_over() -> None:
    block = deepspeed_block(
        2, True, nn.GELU(), drop_tokens=True, capacity_factor=1.5, eval_capacity_factor=3.0, min_capacity=2
    )
    config = from_deepspeed(block).config
    assert (config.capacity_factor, config.eval_capacity_factor, config.min_capacity) == (1.5, 3.0, 2)
    # DeepSpeed's: ceil(tokens / experts * factor * k).
    assert config.capacity(60, training=True) == 30
    # Nothing is dropped at the larger one.
    layer, x = from_deepspeed(block).eval(), inputs()
    assert layer(x).stats.dropped.sum() == 0
    torch.testing.assert_close(layer(x).hidden_states, block(x)[0], **CLOSE)


def without_gate() -> nn.Module:
    block = qwen2()
    del block.shared_expert_gate
    return block


def odd_shared_activation() -> nn.Module:
    block = qwen2()
    block.shared_expert.act_fn = nn.GELU()
    return block


def minimax_m2() -> nn.Module:
    from transformers import MiniMaxM2Config
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock

    sizes = {"intermediate_size": FFN, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    return fill(MiniMaxM2SparseMoeBlock(MiniMaxM2Config(hidden_size=HIDDEN, **sizes)))


def lfm2() -> nn.Module:
    """Sigmoid gates without any buffer."""
    from transformers import Lfm2MoeConfig
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock

    sizes = {"moe_intermediate_size": FFN, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    return fill(Lfm2MoeSparseMoeBlock(Lfm2MoeConfig(hidden_size=HIDDEN, use_expert_bias=False, **sizes)))


def jamba() -> nn.Module:
    """Softmax gates that are not normalised, which no attribute tells."""
    from transformers import JambaConfig
    from transformers.models.jamba.modeling_jamba import JambaSparseMoeBlock

    sizes = {"intermediate_size": FFN, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    return fill(JambaSparseMoeBlock(JambaConfig(hidden_size=HIDDEN, **sizes)))


def odd_activation() -> nn.Module:
    block = mixtral()
    block.experts.act_fn = nn.GELU()
    return block


@pytest.mark.parametrize(
    ("convert", "make", "message"),
    [
        (from_hugging_face, without_gate, "Qwen2MoeSparseMoeBlock has a shared_expert without the gate"),
        (from_hugging_face, odd_shared_activation, "the shared expert's activation is GELU.*; expected silu"),
        (
            from_hugging_face,
            lambda: qwen2(shared_expert_intermediate_size=40),
            "the shared expert's width 40 is no multiple of the other experts' 24",
        ),
        (
            lambda block: from_hugging_face(block, shared_expert_gate=False),
            qwen2,
            "shared_expert_gate is False; expected True, as the block has it",
        ),
        (
            lambda block: from_hugging_face(block, num_shared_experts=0),
            lambda: qwen2().to("meta"),
            "num_shared_experts is 0; expected 2, as the block has it",
        ),
        (from_hugging_face, lambda: switch(router_bias=True), "has the bias router.classifier.bias"),
        (from_hugging_face, lambda: switch(dense_act_fn="tanh"), "activation .*[Tt]anh.* is none of gelu, relu, silu"),
        (from_hugging_face, minimax_m2, "MiniMaxM2SparseMoeBlock has the buffer e_score_correction_bias"),
        (from_hugging_face, lfm2, "Lfm2MoeSparseMoeBlock computes other outputs .*; expected softmax gates"),
        (from_hugging_face, jamba, "JambaSparseMoeBlock computes other outputs"),
        (from_hugging_face, odd_activation, "activation is GELU.*; expected silu"),
        (from_hugging_face, lambda: nn.Linear(2, 2), "Linear is no block that can be converted"),
        (from_deepspeed, lambda: nn.Linear(2, 2), "Linear is no deepspeed.moe.layer.MoE"),
        (from_deepspeed, lambda: deepspeed_block(1, True, nn.GELU(), use_residual=True), "has use_residual"),
        (from_deepspeed, lambda: deepspeed_block(1, True, nn.Linear(FFN, FFN)), "an expert has the modules"),
    ],
)
def test_blocks_without_counterpart(convert, make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(make())


def layer_of(**changes: object) -> MoELayer:
    settings = {"num_experts": EXPERTS, "top_k": 2, "activation": "swiglu", "normalize_gates": True}
    return MoELayer(HIDDEN, FFN, MoEConfig(**settings | changes))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (layer_of(num_prototypes=2, top_k=1), "num_prototypes is 2; MixtralSparseMoeBlock computes as with 1"),
        (layer_of(normalize_gates=False), "normalize_gates is False; MixtralSparseMoeBlock computes as with True"),
        (layer_of(activation="gelu"), "activation is 'gelu'"),
        (layer_of(num_shared_experts=1), "num_shared_experts is 1; MixtralSparseMoeBlock computes as with 0"),
        (layer_of(num_experts=8), "num_experts is 8; MixtralSparseMoeBlock computes as with 6"),
        (MoELayer(HIDDEN, 12, layer_of().config), r"shape \[6, 24, 16\] do not fit those of shape \[6, 48, 16\]"),
    ],
)
def test_layers_without_counterpart_change_nothing(layer: MoELayer, message: str) -> None:
    block = mixtral()
    before = copy.deepcopy(block.state_dict())
    with pytest.raises(ValueError, match=message):
        to_hugging_face(layer, block)
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())


def test_a_block_of_another_gating_is_not_filled() -> None:
    block = jamba()
    before = copy.deepcopy(block.state_dict())
    with pytest.raises(ValueError, match="JambaSparseMoeBlock computes other outputs"):
        to_hugging_face(layer_of(), block)
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())


def test_what_the_comparison_leaves_out() -> None:
    layer = from_hugging_face(mixtral(), capacity_factor=0.1, eval_capacity_factor=0.1, min_capacity=0)
    assert layer.config.eval_capacity_factor == 0.1
    assert from_hugging_face(mixtral().to("meta")).router.weight.is_meta  # where nothing can be compared


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "num_shared_experts is 0; Qwen2MoeSparseMoeBlock computes as with 2"),
        ({"num_shared_experts": 2}, "shared_expert_gate is False; Qwen2MoeSparseMoeBlock computes as with True"),
    ],
)
def test_a_gated_shared_expert_needs_another(changes: dict[str, object], message: str) -> None:
    block = qwen2(norm_topk_prob=True, num_experts_per_tok=2)
    with pytest.raises(ValueError, match=message):
        to_hugging_face(layer_of(**changes), block)
    to_hugging_face(layer_of(num_shared_experts=2, shared_expert_gate=True), block)


def test_deepspeed_has_no_gated_shared_expert() -> None:
    gated = layer_of(activation="gelu", normalize_gates=True, num_shared_experts=1, shared_expert_gate=True)
    with pytest.raises(ValueError, match="num_shared_experts is 1; MoE computes as with 0"):
        to_deepspeed(gated, deepspeed_block(2, False, nn.GELU()))


def test_a_share_of_the_experts_is_not_converted() -> None:
    layer = layer_of()
    layer.experts.keep_local(0, 3, "ep_size_2")
    with pytest.raises(ValueError, match="holds 3 of its 6 experts"):
        to_hugging_face(layer, mixtral())
