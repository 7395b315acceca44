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
        (dict(num_experts=4, activation="swish"), "activation is 'swish'"),
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
