"""The configuration: what it refuses, and the capacity."""

import itertools
import math
import subprocess
import sys
from fractions import Fraction

import pytest

from moe import MoEConfig


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 6, "num_prototypes": 4}, "num_experts"),
        ({"num_prototypes": 2, "top_k": 3}, "top_k"),
        ({"num_groups": 0}, "num_groups"),
        ({"num_groups": 3}, "num_groups"),
        ({"num_prototypes": 2, "num_groups": 4}, "num_groups"),
        ({"num_groups": 2, "groups_per_token": 3}, "groups_per_token"),
        ({"num_groups": 4, "groups_per_token": 1, "top_k": 2}, "groups_per_token"),
        ({"num_prototypes": 2, "num_groups": 2, "exchange": "prototype"}, "exchange"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"eval_capacity_factor": float("nan")}, "eval_capacity_factor"),
        ({"aux_loss_weight": -1.0}, "aux_loss_weight"),
        ({"balance_bias_rate": -1.0}, "balance_bias_rate"),
        ({"capacity_rule": "2"}, "capacity_rule"),
        ({"capacity_rounding": "down"}, "capacity_rounding"),
        ({"gating": None}, "gating"),
        ({"expert_dropout": 1.0}, "expert_dropout"),
        ({"router_jitter": -0.1}, "router_jitter"),
        ({"shared_expert_gate": True}, "shared_expert_gate"),
        ({"exchange": "prototype"}, "exchange"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"overlap_parts": 0}, "overlap_parts"),
        ({"overlap_parts": 2**11}, "overlap_parts"),
        ({"num_experts": 4.0}, "num_experts"),
        ({"num_experts": True}, "num_experts"),
        ({"top_k": None}, "top_k"),
        ({"ranks_per_node": 2.0}, "ranks_per_node"),
        ({"capacity_factor": "1"}, "capacity_factor"),
        ({"aux_loss_weight": True}, "aux_loss_weight"),
        ({"bias": 1}, "bias"),
        ({"normalize_gates": "false"}, "normalize_gates"),
        ({"normalize_gates": True}, "normalize_gates"),  # of one expert
    ],
)
def test_errors_begin_with_the_field(values, field) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        MoEConfig(**{"num_experts": 4} | values)


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


def test_the_capacity_is_the_exact_ceiling() -> None:
    """Against fractions: rounding may neither lose a token's part of a slot nor add one to a whole number."""
    for factor in ("1e-09", "0.001", "0.1", "1.1", "1.003", "1.25", "3.7", "1000000.0"):
        for num_experts, num_tokens in itertools.product((1, 7, 10, 1000, 2**20), (0, 1, 10, 100, 1003, 65536)):
            config = MoEConfig(num_experts=num_experts, capacity_factor=float(factor), min_capacity=0)
            expected = math.ceil(Fraction(factor) * num_tokens / num_experts)
            assert config.capacity(num_tokens, True) == expected, (factor, num_experts, num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "min_capacity", "expected"),
    [
        (4, 0, 0.5),
        (8, 0, 1.0),
        (12, 0, 1.5),
        (4, 1, 1.0),  # the bound is a whole number, and is not rounded
        (12, 1, 1.5),
        (12, 2, 2.0),
        (0, 0, 0.0),
    ],
)
def test_the_mean_of_capacities_rounded_at_random(num_tokens: int, min_capacity: int, expected: float) -> None:
    settings = {"num_experts": 10, "capacity_factor": 1.25, "eval_capacity_factor": 1.25, "min_capacity": min_capacity}
    config = MoEConfig(**settings, capacity_rounding="random")
    assert config.mean_capacity(num_tokens, training=True) == pytest.approx(expected)
    for training, rounded_up in ((False, config), (True, MoEConfig(**settings))):
        assert rounded_up.mean_capacity(num_tokens, training) == math.ceil(expected)
    assert MoEConfig(num_experts=10, capacity_rounding="random").mean_capacity(num_tokens, True) is None
