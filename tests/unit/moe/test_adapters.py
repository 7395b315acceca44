"""Low-rank adapters of experts against weights to which their products were added by hand."""

import pytest
import torch

from moe import MoEConfig, MoELayer


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients(activation, bias):
    torch.manual_seed(0)
    config = MoEConfig(num_experts=4, num_prototypes=2, activation=activation, bias=bias)
    plain = MoELayer(8, 12, config, dtype=torch.float64)
    adapted = MoELayer(8, 12, config, dtype=torch.float64)
    plain.reset_parameters(0.5)
    adapted.load_state_dict(plain.state_dict())
    adapted.experts.add_adapters(rank=3, scale=0.25)
    trained = {name: each for name, each in adapted.experts.named_parameters() if each.requires_grad}
    assert trained.keys() == {f"{name}_lora_{part}" for name in ("w_in", "w_out") for part in "AB"}
    with torch.no_grad():
        for each in trained.values():
            each.normal_()
        for name in ("w_in", "w_out"):
            getattr(plain.experts, name).add_(0.25 * trained[f"{name}_lora_B"] @ trained[f"{name}_lora_A"])

    tokens = torch.randn(20, 8, dtype=torch.float64)
    expected, found = plain(tokens).hidden_states, adapted(tokens).hidden_states
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    expected.square().sum().backward()
    found.square().sum().backward()
    for name in ("w_in", "w_out"):
        gradient = getattr(plain.experts, name).grad
        down, up = trained[f"{name}_lora_A"], trained[f"{name}_lora_B"]
        torch.testing.assert_close(down.grad, 0.25 * up.mT @ gradient, rtol=0, atol=1e-10)
        torch.testing.assert_close(up.grad, 0.25 * gradient @ down.mT, rtol=0, atol=1e-10)
        assert getattr(adapted.experts, name).grad is None


def test_adapters_are_those_of_the_experts_of_a_rank():
    layer = MoELayer(8, 12, MoEConfig(num_experts=4))
    layer.experts.keep_local(2, 2, "ep_size_2")
    layer.experts.add_adapters(rank=3, scale=1.0)
    assert layer.experts.w_in_lora_A.shape == (2, 3, 8)
    assert layer.experts.w_in_lora_B.shape == (2, 12, 3)
    assert layer.experts.w_out_lora_A.shape == (2, 3, 12)
    for parameter in layer.experts.parameters():
        assert (parameter.first_expert, parameter.num_global_experts) == (2, 4)
        assert (parameter.allreduce, parameter.group_name) == (False, "ep_size_2")
