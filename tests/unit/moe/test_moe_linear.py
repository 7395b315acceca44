"""The routed linear map against a loop over tokens in float64, and what it shares with the feed-forward layer."""

import copy
from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import MoEConfig, MoELinear


def make_linear(config: MoEConfig, input_size: int, output_size: int) -> MoELinear:
    linear = MoELinear(input_size, output_size, config).double()
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_(std=0.5)
    return linear


def reference(x, mask, router, weight, config, training):
    """Token by token: the softmax of each prototype, its best experts, a place while there is one."""
    size = config.num_experts // config.num_prototypes
    factor = config.capacity_factor if training else config.eval_capacity_factor
    real = [t for t in range(len(x)) if mask[t]]
    counted = config.num_prototypes * config.top_k if config.capacity_rule == "k" else 1
    capacity = len(real)
    if factor is not None:
        capacity = max(config.min_capacity, ceil(Fraction(str(factor)) * counted * len(real) / config.num_experts))
    load = [0] * config.num_experts
    rows = [x.new_zeros(weight.shape[1]) for _ in x]
    for choice in range(config.top_k):
        for z in range(config.num_prototypes):
            for t in real:
                p = (router[z * size : (z + 1) * size] @ x[t]).softmax(0)
                expert = z * size + int(p.argsort(descending=True)[choice])
                if load[expert] < capacity:
                    load[expert] += 1
                    rows[t] = rows[t] + p[expert - z * size] * (weight[expert] @ x[t])
    return torch.stack(rows), load


@st.composite
def cases(draw):
    prototypes, size = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 4))
    config = MoEConfig(
        num_experts=prototypes * size,
        num_prototypes=prototypes,
        top_k=draw(st.integers(1, size)),
        capacity_factor=draw(st.sampled_from([None, 0.4, 1.25])),
        eval_capacity_factor=draw(st.sampled_from([None, 0.5])),
        capacity_rule=draw(st.sampled_from(["k", "1"])),
        min_capacity=draw(st.integers(0, 2)),
        aux_loss_weight=0.0,
    )
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=9))
    return config, torch.tensor(mask), draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=st.integers(0, 10**6))
def test_forward_and_gradients_equal_the_loop_over_tokens(case, seed) -> None:
    config, mask, input_size, output_size, training = case
    torch.manual_seed(seed)
    linear = make_linear(config, input_size, output_size).train(training)
    x = torch.randn(len(mask), input_size, dtype=torch.float64, requires_grad=True)
    inputs = [x, linear.router.weight, linear.experts.weight]
    output = linear(x, mask)
    rows, load = reference(x, mask, *inputs[1:], config, training)
    zero = sum(0 * tensor.sum() for tensor in inputs)
    direction = torch.randn_like(rows)
    grads = torch.autograd.grad((output.hidden_states * direction).sum() + output.aux_loss, inputs)
    expected_grads = torch.autograd.grad((rows * direction).sum() + zero, inputs)
    # float64: sums of at most 6 terms near 1.
    torch.testing.assert_close(output.hidden_states, rows, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(grads, expected_grads, atol=1e-12, rtol=1e-9)
    assert output.stats.expert_counts.tolist() == load


def test_shape_of_batches_and_no_token_at_all() -> None:
    linear = make_linear(MoEConfig(num_experts=4), 6, 10)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    assert linear(x).hidden_states.shape == (2, 3, 10)
    nothing = linear(x, torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(nothing.hidden_states, torch.zeros(2, 3, 10, dtype=torch.float64))
    nothing.aux_loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype) -> None:
    """The same choices and, to the roundings of 6 products near 1, the same values."""
    torch.manual_seed(0)
    exact = make_linear(MoEConfig(num_experts=4, num_prototypes=2), 6, 10).to(dtype)
    x = torch.randn(20, 6).to(dtype)
    output = exact(x)
    assert output.hidden_states.dtype == dtype
    expected = copy.deepcopy(exact).double()(x.double()).hidden_states
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.hidden_states.double(), expected, atol=tolerance, rtol=tolerance)


def test_parameters_say_which_experts_they_are() -> None:
    linear = make_linear(MoEConfig(num_experts=4), 6, 10)
    whole = linear.experts.weight.detach().clone()
    linear.experts.keep_local(2, 2, "group")
    weight = linear.experts.weight
    assert torch.equal(weight, whole[2:])
    assert (weight.first_expert, weight.num_global_experts, weight.allreduce) == (2, 4, False)


def test_tokens_of_another_type_are_refused() -> None:
    linear = MoELinear(6, 10, MoEConfig(num_experts=4))
    x = torch.randn(20, 6).bfloat16()
    with pytest.raises(ValueError, match=r"weights are torch\.float32, but the tokens are torch\.bfloat16"):
        linear(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x).hidden_states.dtype == torch.bfloat16
