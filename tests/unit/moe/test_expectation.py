"""The expected routing against ``route`` with random choices."""

import itertools

import pytest
import torch

from moe import MoEConfig
from moe.expectation import expected_routing
from moe.routing import route

SMALL = {"num_experts": 16, "num_prototypes": 2, "capacity_factor": 0.5, "min_capacity": 0}
AS_10T = {"num_prototypes": 8, "capacity_factor": 1.25, "capacity_rule": "1", "min_capacity": 0}
AS_10T |= {"num_experts": 64, "capacity_rounding": "random"}
TOP_K = {"num_experts": 16, "capacity_factor": 0.5, "min_capacity": 0}
GROUPS = {"num_experts": 32, "num_prototypes": 4, "num_groups": 4, "capacity_factor": 0.5, "min_capacity": 0}


def simulated(config: MoEConfig, num_tokens: int, training: bool, draws: int) -> tuple[float, float]:
    """Experts a token, and the share of tokens without one, of independent random logits."""
    torch.manual_seed(0)
    pairs = without = 0.0
    for _ in range(draws):
        logits = torch.randn(num_tokens, config.num_prototypes, config.experts_per_prototype)
        tokens = route(logits, config, training)[0].tokens
        pairs += len(tokens) / num_tokens
        without += 1 - len(tokens.unique()) / num_tokens
    return pairs / draws, without / draws


@pytest.mark.parametrize(
    ("settings", "num_tokens", "training"),
    [
        (SMALL, 64, True),
        ({**SMALL, "capacity_factor": 1.25, "min_capacity": 4}, 64, True),
        ({**SMALL, "min_capacity": 4}, 16, True),
        ({**SMALL, "min_capacity": 4, "capacity_rounding": "random"}, 16, True),
        ({**SMALL, "eval_capacity_factor": 0.25}, 64, False),
        (AS_10T, 200, True),
        ({**AS_10T, "eval_capacity_factor": 2.0}, 200, False),
        ({**AS_10T, "drop_order": "probability"}, 200, True),
        ({**TOP_K, "top_k": 2}, 64, True),
        ({**TOP_K, "top_k": 4}, 64, True),
        ({**TOP_K, "top_k": 4, "drop_order": "causal"}, 64, True),
        ({**AS_10T, "drop_order": "causal"}, 200, True),
        ({**TOP_K, "num_experts": 4, "num_prototypes": 4}, 64, True),
        ({**GROUPS, "groups_per_token": 2}, 128, True),
    ],
)
def test_it_is_what_routing_does(settings: dict, num_tokens: int, training: bool):
    """Within 1 % of the pairs and 1 point of the tokens: 300 draws leave about 0.3 of both to chance."""
    config = MoEConfig(**settings)
    pairs, without = simulated(config, num_tokens, training, 300)
    found = expected_routing(config, num_tokens, training)
    assert found.experts_per_token == pytest.approx(pairs, rel=0.01)
    assert found.tokens_without_expert == pytest.approx(without, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({**TOP_K, "top_k": 4, "drop_order": "probability"}, 0.0, 0.06),
        ({**SMALL, "gating": "sigmoid", "normalize_gates": True, "drop_order": "probability"}, 0.0, 0.2),
        ({**GROUPS, "groups_per_token": 1}, -0.06, 0.0),
    ],
)
def test_where_it_is_an_estimate(settings: dict, low: float, high: float):
    """Gates of a token that depend on each other: too many tokens without an expert. One group: too few."""
    config = MoEConfig(**settings)
    pairs, without = simulated(config, 128, True, 200)
    found = expected_routing(config, 128)
    assert found.experts_per_token == pytest.approx(pairs, rel=0.01), "exact for every configuration"
    assert low < found.tokens_without_expert - without < high


def test_one_prototype_of_two_experts_by_all_choices():
    """Every sequence of choices of five tokens, each as likely as the others."""
    config = MoEConfig(num_experts=2, capacity_factor=0.8, min_capacity=0)
    assert config.capacity(5, training=True) == 2
    kept = [min(sum(choices), 2) + min(5 - sum(choices), 2) for choices in itertools.product((0, 1), repeat=5)]
    found = expected_routing(config, 5)
    assert found.experts_per_token == pytest.approx(sum(kept) / len(kept) / 5, rel=1e-12)
    assert found.tokens_without_expert == pytest.approx(1 - sum(kept) / len(kept) / 5, rel=1e-12)


def test_nothing_is_dropped():
    assert expected_routing(MoEConfig(num_experts=8, num_prototypes=4), 100) == (4.0, 0.0)
    assert expected_routing(MoEConfig(num_experts=8, num_prototypes=4, capacity_factor=0.1), 0) == (4.0, 0.0)
    # One token has a place everywhere: a capacity is at least 1 where it is rounded up.
    alone = MoEConfig(num_experts=8, num_prototypes=4, capacity_factor=0.1, eval_capacity_factor=0.1, min_capacity=0)
    assert expected_routing(alone, 1) == (4.0, 0.0)
    assert expected_routing(alone, 1, training=False) == (4.0, 0.0)
