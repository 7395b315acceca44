"""Capacities rounded at random: what they keep, in the mean and of each expert."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoELayer
from moe.routing import Routing, route

EXPERTS, TOKENS = 10, 12


def configure(**settings: object) -> MoEConfig:
    """1.5 tokens for each of the experts under the rule "1"."""
    given = {"num_prototypes": 2, "capacity_factor": 1.25, "capacity_rule": "1", "min_capacity": 0}
    return MoEConfig(num_experts=EXPERTS, capacity_rounding="random", **given | settings)  # type: ignore[arg-type]


def routed(config: MoEConfig, training: bool = True) -> tuple[Routing, torch.Tensor]:
    """The pairs that are left, and how many each prototype dropped, of logits that bring every expert 2 or more."""
    choices = torch.arange(TOKENS)[:, None] % config.experts_per_prototype
    logits = torch.zeros(TOKENS, config.num_prototypes, config.experts_per_prototype)
    logits[torch.arange(TOKENS)[:, None], torch.arange(config.num_prototypes), choices] = 5.0
    routing, _, stats = route(logits, config, training)
    return routing, stats.dropped


def test_half_of_the_experts_keep_one_more() -> None:
    torch.manual_seed(0)
    draws = torch.stack([routed(configure())[0].counts for _ in range(400)])
    assert draws.unique().tolist() == [1, 2]
    # The mean of 4,000 fair coins: five standard deviations are 0.04.
    assert draws.double().mean().item() == pytest.approx(1.5, abs=0.04)
    # Each expert draws by itself: five standard deviations of 400 coins are 0.125.
    assert (draws.double().mean(0) - 1.5).abs().max() < 0.125
    assert (draws.double().var(1) > 0).sum() > 390


def test_the_first_tokens_are_kept_and_the_rest_counted_as_dropped() -> None:
    torch.manual_seed(1)
    routing, dropped = routed(configure())
    first, size = 0, EXPERTS // 2
    for expert, count in enumerate(routing.counts.tolist()):
        kept = routing.tokens[first : first + count].tolist()
        assert kept == [expert % size + size * place for place in range(count)]
        first += count
    assert dropped.tolist() == (TOKENS - routing.counts.view(2, -1).sum(1)).tolist()


def test_a_capacity_below_one_leaves_experts_without_tokens() -> None:
    torch.manual_seed(2)
    draws = torch.stack([routed(configure(capacity_factor=0.25))[0].counts for _ in range(400)])
    assert draws.unique().tolist() == [0, 1]
    assert draws.double().mean().item() == pytest.approx(0.3, abs=0.04)
    assert routed(configure(capacity_factor=0.25, min_capacity=1))[0].counts.tolist() == [1] * EXPERTS


def test_evaluation_rounds_up_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    config = configure(eval_capacity_factor=1.25)
    assert routed(config, training=False)[0].counts.tolist() == [2] * EXPERTS
    assert routed(configure(capacity_factor=5 / 3))[0].counts.tolist() == [2] * EXPERTS  # a whole number
    assert torch.equal(torch.get_rng_state(), state)


def test_activation_checkpointing_draws_the_same_again() -> None:
    torch.manual_seed(3)
    layer = MoELayer(8, 16, configure())
    tokens = torch.randn(TOKENS, 8)
    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(4)
        output = run(tokens)
        gradients.append(torch.autograd.grad(output.hidden_states.square().sum(), list(layer.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
