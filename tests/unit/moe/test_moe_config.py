import subprocess
import sys

import pytest

from moe import MoEConfig


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(num_experts=0), "num_experts is 0"),
        (dict(num_experts=6, num_prototypes=4), "num_experts 6 is no multiple of num_prototypes 4"),
        (dict(num_experts=6, num_prototypes=3, top_k=3), "top_k 3 is more than the 2 experts"),
        (dict(num_experts=4, capacity_factor=0.0), r"capacity_factor is 0\.0"),
        (dict(num_experts=4, eval_capacity_factor=float("nan")), "eval_capacity_factor is nan"),
        (dict(num_experts=4, aux_loss_weight=-1.0), r"aux_loss_weight is -1\.0"),
        (dict(num_experts=4, capacity_rule="2"), "capacity_rule is '2'"),
        (dict(num_experts=4, activation="swish"), "activation is 'swish'; expected .*swiglu"),
        (dict(num_experts=4, gating="sigmoidal"), "gating is 'sigmoidal'"),
        (dict(num_experts=4, drop_order="random"), "drop_order is 'random'"),
        (dict(num_experts=4, expert_dropout=1.0), r"expert_dropout is 1\.0; expected a number in \[0, 1\)"),
        (dict(num_experts=4, router_jitter=-0.1), r"router_jitter is -0\.1"),
        (dict(num_experts=4, balance_bias_rate=-1.0), r"balance_bias_rate is -1\.0"),
        (dict(num_experts=4, shared_expert_gate=True), "shared_expert_gate is true, but num_shared_experts is 0"),
        (dict(num_experts=4, routing="expert_choice"), "capacity_factor is none, but with routing"),
        (dict(num_experts=4.0), r"num_experts is 4\.0; expected an integer"),
        (dict(num_experts=4, top_k=1.5), r"top_k is 1\.5; expected an integer"),
        (dict(num_experts=True), "num_experts is True; expected an integer"),
        (dict(num_experts=4, num_prototypes="2"), "num_prototypes is '2'; expected an integer"),
        (dict(num_experts=4, min_capacity=2.5), r"min_capacity is 2\.5; expected an integer"),
        (dict(num_experts=4, num_shared_experts=0.5), r"num_shared_experts is 0\.5; expected an integer"),
        (dict(num_experts=4, ranks_per_node=2.0), r"ranks_per_node is 2\.0; expected an integer, or none"),
        (dict(num_experts=4, top_k=None), "top_k is None; expected an integer"),
        (dict(num_experts=4, capacity_factor="1"), "capacity_factor is '1'; expected a number, or none"),
        (dict(num_experts=4, aux_loss_weight=True), "aux_loss_weight is True; expected a number"),
        (dict(num_experts=4, bias=1), "bias is 1; expected true or false"),
        (dict(num_experts=4, normalize_gates="false"), "normalize_gates is 'false'; expected true or false"),
        (dict(num_experts=4, gating=None), 'gating is None; expected "softmax" or'),
    ],
)
def test_mistakes_are_named(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**kwargs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"balance_bias_rate": 0.1}, r"balance_bias_rate is 0\.1, .* plays no part; expected 0\.0"),
        ({"normalize_gates": True}, "normalize_gates is True, .* plays no part; expected False"),
        ({"drop_order": "probability"}, "drop_order is 'probability', .* plays no part; expected 'position'"),
        ({"balance_scope": "global_batch"}, "balance_scope is 'global_batch', .* plays no part"),
        ({"top_k": 2, "capacity_rule": "1"}, "top_k is 2, .* plays no part; expected 1"),
    ],
)
def test_what_expert_choice_would_ignore_is_refused(changes, message) -> None:
    choice = {"num_experts": 4, "routing": "expert_choice", "capacity_factor": 1, "eval_capacity_factor": 1.0}
    assert MoEConfig(**choice | {"top_k": 2}).capacity(8, True) == 4  # ceil(1 * 2 * 8 / 4): rule "k" counts them
    with pytest.raises(ValueError, match=message):
        MoEConfig(**choice | changes)


@pytest.mark.parametrize(
    ("rule", "num_tokens", "training", "expected"),
    [
        ("k", 100, True, 32),  # ceil(1.25 * 4 * 100 / 16) = ceil(31.25)
        ("1", 100, True, 8),  # ceil(1.25 * 100 / 16) = ceil(7.8125)
        ("1", 10, True, 4),  # min_capacity
        ("k", 100, False, 50),  # ceil(2.0 * 4 * 100 / 16)
    ],
)
def test_capacity(rule, num_tokens, training, expected) -> None:
    config = MoEConfig(
        num_experts=16,
        num_prototypes=2,
        top_k=2,
        capacity_factor=1.25,
        eval_capacity_factor=2.0,
        capacity_rule=rule,
    )
    assert config.capacity(num_tokens, training) == expected
    assert MoEConfig(num_experts=10, capacity_factor=1.1).capacity(100, True) == 11
    assert MoEConfig(num_experts=16).capacity(num_tokens, training) is None


def test_import_loads_torch_alone() -> None:
    program = "import sys, moe; print([m for m in ('deepspeed', 'transformers', 'm6', 'offload') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_capacity_without_any_place_is_refused() -> None:
    config = MoEConfig(num_experts=8, capacity_factor=1e-9, min_capacity=0)
    with pytest.raises(ValueError, match=r"capacity_factor 1e-09 leaves no place for any of 100 tokens in 8 experts"):
        config.capacity(100, True)
    assert config.capacity(0, True) == 0
