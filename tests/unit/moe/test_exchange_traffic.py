"""The closed form of what an exchange sends; against running exchanges: tests/distributed/test_exchange.py."""

import itertools
import math

import pytest
import torch

from moe import MoEConfig
from moe.config import DispatchDtype
from moe.dispatch_dtype import CODECS
from moe.exchange_traffic import exchange_traffic, nodes_of_token
from tests.fixtures.moe_reference import every_choice


@pytest.mark.parametrize(
    ("nodes", "prototypes", "experts", "top_k", "groups"),
    [
        (2, 1, 8, 2, (1, 1)),
        (4, 2, 6, 1, (1, 1)),
        (3, 2, 6, 2, (1, 1)),
        (4, 3, 4, 1, (1, 1)),
        (8, 1, 8, 3, (1, 1)),
        (4, 2, 8, 1, (4, 2)),
        (4, 3, 4, 1, (4, 1)),
        (2, 2, 8, 2, (4, 3)),
        (8, 2, 8, 1, (2, 1)),
        (4, 1, 8, 2, (2, 2)),
        (4, 2, 6, 1, (3, 2)),
        (2, 2, 6, 2, (3, 1)),
        (3, 1, 12, 2, (4, 2)),
    ],
)
@pytest.mark.parametrize("kept", [0.0, 0.25, 1.0])
def test_nodes_of_a_token_are_those_of_all_choices(
    nodes: int, prototypes: int, experts: int, top_k: int, groups: tuple[int, int], kept: float
):
    config = MoEConfig(
        num_experts=prototypes * experts,
        num_prototypes=prototypes,
        top_k=top_k,
        num_groups=groups[0],
        groups_per_token=groups[1],
    )
    per_node, expected = config.num_experts // nodes, 0.0
    everything = list(every_choice(config))
    for chosen in everything:
        for survives in itertools.product((False, True), repeat=len(chosen)):
            probability = math.prod(kept if one else 1 - kept for one in survives)
            expected += probability * len({each // per_node for each, one in zip(chosen, survives, strict=True) if one})
    assert nodes_of_token(config, prototypes, nodes, kept) == pytest.approx(expected / len(everything), rel=1e-12)


def rows_between_nodes(config: MoEConfig, ep_size: int) -> float:
    """Rows that a rank sends to other nodes of eight ranks for each of its tokens, in one direction."""
    steps = exchange_traffic(config, ep_size, 1, config.experts_per_token, 8)
    return sum(step.rows * (1 - step.near_peers / step.peers) for step in steps)


def test_node_first_sends_a_fifth_where_a_node_has_many_experts_of_a_token():
    """The Pseudo stage of 10T: 80 experts a token on 16 nodes, whose every node has whole prototypes."""
    settings = {"num_experts": 10240, "num_prototypes": 80, "exchange": "all_to_all"}
    flat, first = MoEConfig(**settings), MoEConfig(**settings, ranks_per_node=8)
    assert [step.rows for step in exchange_traffic(flat, 128, 1, 80, 8)] == [80 * 127 / 128]
    assert [step.rows for step in exchange_traffic(first, 128, 1, 80, 8)] == [15, 80 * 7 / 8]
    assert rows_between_nodes(flat, 128) == pytest.approx(75)
    assert rows_between_nodes(first, 128) == pytest.approx(15)


def test_node_limited_routing_sends_a_fifth_over_any_number_of_nodes():
    """K = 80 on 64 nodes, each with two experts of every prototype, of which a token visits 15."""
    settings = {"num_experts": 10240, "num_prototypes": 80, "exchange": "all_to_all"}
    anywhere = MoEConfig(**settings, ranks_per_node=8)
    limited = MoEConfig(**settings, ranks_per_node=8, num_groups=64, groups_per_token=15)
    assert rows_between_nodes(MoEConfig(**settings), 512) == pytest.approx(80 * 504 / 512)
    assert rows_between_nodes(anywhere, 512) == pytest.approx(59.06, abs=0.01)  # one or two of the 80 prototypes each
    assert 14 < rows_between_nodes(limited, 512) < 15


def test_nodes_that_share_one_prototype():
    """Eight nodes, of which pairs share one of four prototypes: 3 rows to the others, and half of 4 to its partner."""
    config = MoEConfig(num_experts=64, num_prototypes=4, exchange="prototype", ranks_per_node=1)
    view_prototypes, within = exchange_traffic(config, 8, 1, 4, 1)
    assert view_prototypes.rows == 3
    assert within.rows == pytest.approx(4 * 1 / 2)


def test_ranks_of_one_node_send_nothing_to_others():
    config = MoEConfig(num_experts=16, num_prototypes=2)
    for step in exchange_traffic(config, 8, 100, 200, 8):
        assert step.near_peers == step.peers
        assert step.num_bytes(2, 2)[1] == 0
    assert exchange_traffic(config, 1, 100, 200, 8) == ()


def test_what_does_not_fit_is_refused_as_by_the_exchange():
    with pytest.raises(ValueError, match="ep_size 3 does not divide num_experts 16"):
        exchange_traffic(MoEConfig(num_experts=16), 3, 1, 1, 8)


@pytest.mark.parametrize("dispatch_dtype", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_row_are_those_of_its_encoding(dispatch_dtype: DispatchDtype, dtype: torch.dtype):
    rows = torch.randn(3, 24, dtype=dtype)
    for codec in CODECS[dispatch_dtype]:
        encoded = codec.encode(rows)
        assert codec.row_bytes(24, dtype.itemsize) * 3 == encoded.numel() * encoded.element_size()
