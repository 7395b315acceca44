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
        (dict(num_experts=4, routing="expert_choice"), "capacity_factor is none, but with routing"),
        (
            dict(
                num_experts=4,
                routing="expert_choice",
                capacity_factor=1.0,
                eval_capacity_factor=1.0,
                balance_bias_rate=0.1,
            ),
            r"balance_bias_rate is 0\.1, but with routing",
        ),
    ],
)
def test_mistakes_are_named(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**kwargs)


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
