"""Which exchange is chosen, and what numbers it refuses."""

import dataclasses
import itertools
from fractions import Fraction

import pytest

from moe import MoEConfig
from moe.exchange_steps import exchange_steps
from moe.exchange_traffic import exchange_traffic


def steps(ep_size: int, **settings: object) -> str:
    config = MoEConfig(**({"num_experts": 96} | settings))
    return ", ".join(f"{step.kind} {step.size}" for step in exchange_steps(config, ep_size))


@pytest.mark.parametrize(
    ("expected", "ep_size", "settings"),
    [
        ("", 1, {"num_prototypes": 4, "exchange": "prototype"}),
        ("all_to_all 8", 8, {}),
        ("prototype 8", 8, {"num_prototypes": 8}),
        ("prototype 4", 4, {"num_prototypes": 8}),
        ("all_to_all 8", 8, {"num_prototypes": 4}),
        ("prototype 4, all_to_all 2", 8, {"num_prototypes": 4, "exchange": "prototype"}),
        ("prototype 2, all_to_all 3", 6, {"num_prototypes": 4, "exchange": "prototype"}),
        ("all_to_all 8", 8, {"num_prototypes": 8, "exchange": "all_to_all"}),
        ("prototype 4, all_to_all 8", 32, {"num_prototypes": 4, "ranks_per_node": 8}),
        ("prototype 4, prototype 2", 8, {"num_prototypes": 8, "ranks_per_node": 2}),
        (
            "prototype 4, prototype 2, all_to_all 4",
            32,
            {"num_prototypes": 8, "ranks_per_node": 8, "exchange": "prototype"},
        ),
        ("node 4, all_to_all 2", 8, {"num_prototypes": 2, "ranks_per_node": 2}),
        ("node 4, all_to_all 8", 32, {"ranks_per_node": 8}),
        ("all_to_all 4", 4, {"ranks_per_node": 8}),
        ("prototype 2, all_to_all 2", 4, {"num_prototypes": 2, "top_k": 4}),
        ("all_to_all 4", 4, {"num_prototypes": 2, "top_k": 2}),
        ("prototype 4", 4, {"num_prototypes": 4}),
        ("prototype 2, prototype 2, all_to_all 2", 8, {"num_prototypes": 4, "top_k": 4, "ranks_per_node": 4}),
        ("node 4, all_to_all 2", 8, {"num_prototypes": 2, "top_k": 16, "ranks_per_node": 2}),
        # No rank has a whole prototype.
        ("all_to_all 4", 4, {"num_prototypes": 4, "num_groups": 4}),
        ("node 4, all_to_all 2", 8, {"num_prototypes": 8, "num_groups": 4, "ranks_per_node": 2}),
        ("node 2, all_to_all 2", 4, {"num_prototypes": 8, "num_groups": 4, "ranks_per_node": 2}),
        # Room for 1.25 experts a token instead of 8 or 4, and for all that a balanced router chooses.
        ("all_to_all 8", 8, {"num_prototypes": 8, "capacity_rule": "1", "capacity_factor": 1.25}),
        ("prototype 8", 8, {"num_prototypes": 8, "capacity_factor": 1.25}),
        ("all_to_all 8", 8, {"num_prototypes": 8, "capacity_factor": 0.9}),
        ("all_to_all 2", 2, {"num_prototypes": 4, "capacity_rule": "1", "capacity_factor": 1.25}),
        ("prototype 2", 2, {"num_prototypes": 4, "capacity_rule": "1", "capacity_factor": 2.0}),
        ("all_to_all 4", 4, {"num_prototypes": 2, "top_k": 4, "capacity_factor": 0.5}),
        ("node 4, all_to_all 2", 8, {"num_prototypes": 8, "ranks_per_node": 2, "capacity_factor": 0.5}),
        ("prototype 8", 8, {"num_prototypes": 8, "exchange": "prototype", "capacity_factor": 0.5}),
    ],
)
def test_steps(expected: str, ep_size: int, settings: dict) -> None:
    assert steps(ep_size, **settings) == expected


def rows_per_token(config: MoEConfig, ep_size: int) -> Fraction:
    """Rows that a rank sends to others, each way and for each of its tokens; the pairs are spread evenly."""
    tokens, pairs, rows = 1, config.experts_per_token, Fraction(0)
    for step in exchange_steps(config, ep_size):
        if step.kind == "prototype":  # every token to every part, which then has the tokens of all
            rows += (step.size - 1) * tokens
            tokens, pairs = tokens * step.size, pairs // step.size
        else:
            rows += tokens * pairs * Fraction(step.size - 1, step.size)
    return rows


@pytest.mark.parametrize(("rule", "factor"), [("k", 1.25), ("k", 0.6), ("1", 1.25), ("1", 4.0)])
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_auto_counts_what_a_capacity_leaves_over(rule: str, factor: float, ranks_per_node: int | None) -> None:
    """The rows of the closed form, between nodes where there are some; many tokens, so that nothing is rounded."""
    tokens, better = 10**6, 0
    for ep_size, prototypes, top_k in itertools.product((4, 6, 8, 16), (1, 2, 4, 6, 8), (1, 3)):
        settings = {"num_prototypes": prototypes, "top_k": top_k, "capacity_rule": rule, "capacity_factor": factor}
        config = MoEConfig(num_experts=96, ranks_per_node=ranks_per_node, **settings)
        pairs = min(tokens * config.experts_per_token, config.capacity(tokens, True) * 96)
        assert pairs == pytest.approx(tokens * config.experts_per_token * config.kept_share, rel=1e-3)

        def rows(config: MoEConfig, ep_size: int = ep_size, pairs: int = pairs) -> float:
            steps = exchange_traffic(config, ep_size, tokens, pairs, ranks_per_node or 1)
            return sum(step.rows * (1 - step.near_peers / step.peers) for step in steps)

        for other in ("all_to_all", "prototype"):
            try:
                others = rows(dataclasses.replace(config, exchange=other))
            except ValueError:  # no prototypes to divide by
                continue
            assert rows(config) <= others * (1 + 1e-3), (ep_size, config, other)
            better += rows(config) < others * (1 - 1e-3)
    assert better > 3


def test_auto_never_moves_more_rows_than_another_exchange() -> None:
    cases = itertools.product((2, 3, 4, 6, 8, 16), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4))
    better = 0
    for ep_size, prototypes, top_k in cases:
        config = MoEConfig(num_experts=96, num_prototypes=prototypes, top_k=top_k)
        rows = rows_per_token(config, ep_size)
        for other in ("all_to_all", "prototype"):
            try:
                others = rows_per_token(dataclasses.replace(config, exchange=other), ep_size)
            except ValueError:  # no prototypes to divide by
                continue
            assert rows <= others, (ep_size, config)
            better += rows < others
    assert better > 50


@pytest.mark.parametrize(
    ("message", "ep_size", "settings"),
    [
        ("ep_size 5 does not divide num_experts 96", 5, {}),
        ("num_prototypes 3 and ep_size 2 have no common divisor", 2, {"num_prototypes": 3, "exchange": "prototype"}),
        ("ep_size 6 and ranks_per_node 4: one must be a multiple of the other", 6, {"ranks_per_node": 4}),
        ('exchange is "prototype", but num_prototypes is 1', 2, {"exchange": "prototype"}),
        ("exchange is 'both'; expected \"auto\"", 2, {"exchange": "both"}),
        ("dispatch_dtype is 'int8'; expected \"same\"", 2, {"dispatch_dtype": "int8"}),
        ("ranks_per_node is 0; expected at least 1", 2, {"ranks_per_node": 0}),
    ],
)
def test_sizes_that_do_not_fit_are_errors(message: str, ep_size: int, settings: dict) -> None:
    with pytest.raises(ValueError, match=message):
        steps(ep_size, **settings)
