"""Which exchange is chosen, and what numbers it refuses."""

import pytest

from moe import MoEConfig
from moe.expert_parallel import exchange_steps


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
    ],
)
def test_steps(expected: str, ep_size: int, settings: dict) -> None:
    assert steps(ep_size, **settings) == expected


@pytest.mark.parametrize(
    ("message", "ep_size", "settings"),
    [
        ("ep_size 5 does not divide num_experts 96", 5, {}),
        ("num_prototypes 3 and ep_size 2 have no common divisor", 2, {"num_prototypes": 3, "exchange": "prototype"}),
        ("ep_size 6 and ranks_per_node 4: one must be a multiple of the other", 6, {"ranks_per_node": 4}),
        ('exchange is "prototype", but num_prototypes is 1', 2, {"exchange": "prototype"}),
        ("exchange is 'both'; expected \"auto\"", 2, {"exchange": "both"}),
        ("payload is 'int8'; expected \"same\"", 2, {"payload": "int8"}),
        ("ranks_per_node is 0; expected at least 1", 2, {"ranks_per_node": 0}),
    ],
)
def test_numbers_that_do_not_fit(message: str, ep_size: int, settings: dict) -> None:
    with pytest.raises(ValueError, match=message):
        steps(ep_size, **settings)
