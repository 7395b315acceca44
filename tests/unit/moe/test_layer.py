"""The layer against the loop over tokens, in float64: tolerance 1e-9, about 1e6 rounding errors of values near 1."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoELayer
from tests.fixtures.moe_layers import cases, make_layer, prepared
from tests.fixtures.moe_reference import reference_moe


@settings(max_examples=150)
@given(case=cases(), seed=st.integers(0, 10**6))
def test_forward_and_gradients_equal_the_reference(case, seed) -> None:
    layer, x, mask = prepared(case, seed)
    direction = torch.randn_like(x)
    parameters = dict(layer.named_parameters())
    inputs = [x, *parameters.values()]

    def gradients(loss):
        return torch.autograd.grad(loss + sum(0 * each.sum() for each in inputs), inputs)  # 0: no token reached it

    output = layer(x, mask)
    grads = gradients((output.hidden_states * direction).sum() + output.aux_loss)
    expected = reference_moe(x, mask, {**parameters, **dict(layer.named_buffers())}, layer.config, layer.training)
    expected_grads = gradients((expected.hidden_states * direction).sum() + expected.aux_loss)

    close = dict(rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(output.hidden_states, expected.hidden_states, **close)
    torch.testing.assert_close(output.aux_loss, expected.aux_loss, **close)
    torch.testing.assert_close(grads, expected_grads, **close)
    assert output.stats.expert_counts.tolist() == [len(tokens) for tokens in expected.tokens_of_expert]
    assert output.stats.chosen_counts.tolist() == expected.chosen_counts
    assert output.stats.dropped.tolist() == expected.dropped
    computed = {t for tokens in expected.tokens_of_expert for t in tokens}
    assert output.stats.without_expert.item() == mask.sum().item() - len(computed)
    assert output.stats.gate_sum.item() == pytest.approx(expected.gate_sum, rel=1e-6)  # float32
    assert output.stats.num_tokens.item() == mask.sum().item()
    assert output.stats.router_entropy.tolist() == pytest.approx(expected.router_entropy, abs=1e-6)  # float32
    choices = mask.sum().item() * layer.config.experts_per_token  # every choice is either computed or dropped
    assert output.stats.expert_counts.sum() + output.stats.dropped.sum() == choices


@pytest.mark.parametrize(("hidden_size", "ffn_hidden_size"), [(8, 12), (6, 12), (8, 5)])
def test_grouped_product_and_loop_agree_in_float32(hidden_size: int, ffn_hidden_size: int) -> None:
    """(8, 12) is aligned and takes the grouped product, the others the loop. 1e-5: sums of 12 terms near 1."""
    torch.manual_seed(0)
    config = MoEConfig(num_experts=6, num_prototypes=2, top_k=2, capacity_factor=1.0)
    exact = make_layer(config, hidden_size, ffn_hidden_size)
    layer = MoELayer(hidden_size, ffn_hidden_size, config)
    layer.load_state_dict(exact.state_dict())
    x = torch.randn(3, 7, hidden_size)
    for each, inputs in ((exact, x.double()), (layer, x)):
        output = each(inputs)
        (output.hidden_states.square().mean() + output.aux_loss).backward()
    torch.testing.assert_close(layer(x).hidden_states.double(), exact(x.double()).hidden_states, rtol=1e-5, atol=1e-5)
    for (name, parameter), reference in zip(layer.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), reference.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_tokens_choose_one_expert(dtype: torch.dtype) -> None:
    layer = make_layer(MoEConfig(num_experts=4), dtype=dtype)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
    x = torch.rand(5, 8, dtype=dtype)
    output = layer(x)
    assert output.stats.expert_counts.tolist() == [0, 0, 5, 0]
    output.hidden_states.sum().backward()
    for weight in layer.experts.parameters():
        assert weight.grad[2].abs().sum() > 0
        assert weight.grad[[0, 1, 3]].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_only_padding(dtype: torch.dtype, capacity_factor: float | None) -> None:
    config = MoEConfig(num_experts=4, num_prototypes=2, capacity_factor=capacity_factor, z_loss_weight=0.1)
    layer = make_layer(config, dtype=dtype)
    x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    for inputs, mask in ((x, torch.zeros(2, 3, dtype=torch.bool)), (x[:0], None)):
        output = layer(inputs, mask)
        (output.hidden_states.sum() + output.aux_loss).backward()
        assert output.hidden_states.shape == inputs.shape
        assert output.hidden_states.abs().sum() == 0
        assert output.aux_loss == 0
        assert output.stats.num_tokens == output.stats.router_entropy.sum() == 0
        for tensor in [x, *layer.parameters()]:
            assert tensor.grad.abs().sum() == 0
            tensor.grad = None


def test_padding_changes_nothing_even_when_not_finite() -> None:
    torch.manual_seed(0)
    layer = make_layer(MoEConfig(num_experts=4, num_prototypes=2, capacity_factor=0.5, min_capacity=1))
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    mask = torch.rand(2, 6) < 0.6
    padded = x.masked_fill(~mask[..., None], float("nan"))
    output, expected = layer(padded, mask), layer(x[mask])
    torch.testing.assert_close(output.hidden_states[mask], expected.hidden_states, rtol=0, atol=0)
    assert output.hidden_states[~mask].abs().sum() == 0
    assert torch.equal(output.aux_loss, expected.aux_loss)
    for of_padded, alone in zip(output.stats, expected.stats, strict=True):
        assert torch.equal(of_padded, alone)
    output.hidden_states.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_earlier_tokens_are_kept_first() -> None:
    torch.manual_seed(0)
    layer = make_layer(MoEConfig(num_experts=4, num_prototypes=2, capacity_factor=1.0, min_capacity=0))
    x = torch.randn(8, dtype=torch.float64).expand(10, 8)
    output = layer(x)  # C = 1.0 * 2 * 10 / 4
    assert sorted(output.stats.expert_counts.tolist()) == [0, 0, 5, 5]
    assert output.stats.dropped.tolist() == [5, 5]
    assert output.hidden_states[5:].abs().sum() == 0
    torch.testing.assert_close(
        output.hidden_states[:5], layer.eval()(x[:1]).hidden_states.expand(5, 8), rtol=1e-12, atol=0
    )


def test_first_choices_are_kept_before_second_choices() -> None:
    layer = make_layer(MoEConfig(num_experts=2, top_k=2, capacity_factor=0.5, min_capacity=0), hidden_size=2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)  # C = 0.5 * 2 * 2 / 2 = 1
    output = layer(x).hidden_states
    gate = torch.tensor([1.0, 0.0]).softmax(0)[0].item()
    experts = layer.experts
    for t in range(2):
        hidden = torch.nn.functional.gelu(experts.w_in[t] @ x[t])
        torch.testing.assert_close(output[t], gate * (experts.w_out[t] @ hidden), rtol=1e-6, atol=1e-6)


def test_balancing_loss_is_one_for_an_even_load_and_m_for_a_collapsed_one() -> None:
    config = MoEConfig(num_experts=8, num_prototypes=2, aux_loss_weight=1.0)
    layer = make_layer(config, hidden_size=4)
    with torch.no_grad():
        layer.router.weight.copy_(100 * torch.eye(4).repeat(2, 1))
    tokens = torch.eye(4, dtype=torch.float64)
    assert layer(tokens).aux_loss.item() == pytest.approx(1.0)
    assert layer(tokens[:1].expand(4, 4)).aux_loss.item() == pytest.approx(4.0)


def test_activation_checkpointing_gives_equal_gradients() -> None:
    torch.manual_seed(0)
    layer = make_layer(MoEConfig(num_experts=4, num_prototypes=2, capacity_factor=1.0), dtype=torch.float32)
    x = torch.randn(9, 8, requires_grad=True)
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        output = run(x)
        grads.append(torch.autograd.grad(output.hidden_states.sum() + output.aux_loss, [x, *layer.parameters()]))
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


def test_experts_start_independent() -> None:
    torch.manual_seed(0)
    layer = MoELayer(32, 64, MoEConfig(num_experts=8))
    for weight in (layer.router.weight, layer.experts.w_in, layer.experts.w_out):
        assert weight.std().item() == pytest.approx(0.02, rel=0.15)
        flat = weight.flatten(1)
        assert torch.cdist(flat, flat).add(torch.eye(8)).min() > 0.05


def test_attributes_of_parameters_survive_moves_copies_and_loading() -> None:
    with torch.device("meta"):
        layer = MoELayer(8, 12, MoEConfig(num_experts=4))
    layer.experts.w_out.requires_grad_(False)
    layer.experts.keep_local(2, 2, "ep_size_2")
    assert [parameter.requires_grad for parameter in layer.experts.parameters()] == [True, False]
    layer.to_empty(device="cpu")
    copied = copy.deepcopy(layer)
    copied_again = copy.deepcopy(layer)
    copied_again.load_state_dict(layer.state_dict(), assign=True)
    for each in (layer, copied, copied_again, layer.bfloat16()):
        for parameter in each.experts.parameters():
            assert parameter.shape[0] == 2
            assert (parameter.first_expert, parameter.num_global_experts) == (2, 4)
            assert (parameter.allreduce, parameter.group_name) == (False, "ep_size_2")


@pytest.mark.parametrize(
    ("inputs", "mask", "message"),
    [
        (torch.zeros(3, 7), None, r"shape \(3, 7\); expected 8 columns"),
        (torch.zeros(3, 8, dtype=torch.int64), None, "hidden_states is torch.int64"),
        (torch.zeros(3, 8, dtype=torch.bfloat16), None, "weights are torch.float32, but the tokens are torch.bfloat16"),
        (torch.zeros(3, 8, device="meta"), None, "hidden_states is on meta, but the layer on cpu"),
        (torch.zeros(3, 8), torch.ones(3), "token_mask is torch.float32; expected torch.bool or integers"),
        (torch.zeros(3, 8), torch.ones(4, dtype=torch.bool), r"token_mask has the shape \(4,\).*expected \(3,\)"),
    ],
)
def test_errors_name_the_input(inputs, mask, message) -> None:
    layer = MoELayer(8, 12, MoEConfig(num_experts=4))
    with pytest.raises(ValueError, match=message):
        layer(inputs, mask)


def test_depth_scaled_initialisation() -> None:
    torch.manual_seed(0)
    config = MoEConfig(num_experts=4, bias=True, num_shared_experts=2, shared_expert_gate=True)
    layer = MoELayer(512, 64, config)
    layer.reset_parameters(deviation=0.1, num_layers=8)
    for name, parameter in layer.named_parameters():
        expected = 0.0 if name.endswith(("b_in", "b_out")) else 0.1 / 4 if name.endswith("w_out") else 0.1
        assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_larger_gates_are_kept_first() -> None:
    config = MoEConfig(num_experts=2, capacity_factor=0.5, min_capacity=0, drop_order="probability")
    layer = make_layer(config, hidden_size=2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)  # C = 0.5 * 4 / 2 = 1
    computed = layer(x).hidden_states.abs().sum(-1) > 0
    assert computed.tolist() == [False, True, False, True]


def test_earlier_places_of_all_rows_are_kept_first() -> None:
    config = MoEConfig(num_experts=2, capacity_factor=1.0, min_capacity=0, top_k=1, drop_order="causal")
    layer = make_layer(config, hidden_size=2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(2, 4, 2)  # all choose expert 0; C = 3 of 6
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    computed = layer(x, mask).hidden_states.abs().sum(-1) > 0
    assert computed.tolist() == [[False, True, False, False], [True, True, False, False]]


def test_one_token_without_a_dimension_for_tokens() -> None:
    layer = make_layer(MoEConfig(num_experts=4, num_prototypes=2))
    x = torch.randn(8, dtype=torch.float64)
    expected = layer(x[None])
    for mask in (None, torch.tensor(True)):
        output = layer(x, mask)
        assert torch.equal(output.hidden_states, expected.hidden_states[0])
        assert output.stats.num_tokens == 1
    assert layer(x, torch.tensor(False)).hidden_states.tolist() == [0.0] * 8


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_masks_of_integers(dtype: torch.dtype) -> None:
    layer = make_layer(MoEConfig(num_experts=4, num_prototypes=2))
    x, mask = torch.randn(2, 5, 8, dtype=torch.float64), torch.rand(2, 5) < 0.5
    for own, expected in zip(layer(x, mask.to(dtype))[:2], layer(x, mask)[:2], strict=True):
        assert torch.equal(own, expected)


def test_device_and_type_are_those_of_the_arguments() -> None:
    config = MoEConfig(num_experts=4, bias=True, num_shared_experts=1, shared_expert_gate=True, balance_bias_rate=0.1)
    layer = MoELayer(8, 12, config, device="meta", dtype=torch.bfloat16)
    assert (layer.hidden_size, layer.ffn_hidden_size) == (8, 12)
    assert len(list(layer.parameters())) == 10
    for parameter in layer.parameters():
        assert (parameter.device.type, parameter.dtype) == ("meta", torch.bfloat16)
    assert (layer.router.balance_bias.device.type, layer.router.balance_bias.dtype) == ("meta", torch.float32)
    # As PyTorch's modules do it: memory first, then numbers, the balancing biases included.
    layer.to_empty(device="cpu")
    for tensor in (*layer.parameters(), layer.router.balance_bias):
        tensor.detach().fill_(float("nan"))
    layer.reset_parameters()
    assert layer.router.balance_bias.tolist() == [0.0] * 4
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
