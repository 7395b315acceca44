"""The closed form of what an exchange sends; against running exchanges: tests/distributed/test_exchange.py."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from moe import MoEConfig
from moe.exchange_traffic import exchange_traffic, nodes_of_token
from moe.payload import CODECS, Payload


def choices(prototypes: int, experts: int, top_k: int) -> Iterator[tuple[int, ...]]:
    """All sets of experts that a token may choose."""
    of_each = [
        [tuple(z * experts + e for e in chosen) for chosen in itertools.combinations(range(experts), top_k)]
        for z in range(prototypes)
    ]
    for parts in itertools.product(*of_each):
        yield tuple(itertools.chain.from_iterable(parts))


@pytest.mark.parametrize(
    ("nodes", "prototypes", "experts", "top_k"), [(2, 1, 8, 2), (4, 2, 6, 1), (3, 2, 6, 2), (4, 3, 4, 1), (8, 1, 8, 3)]
)
def test_nodes_of_a_token_are_those_of_all_choices(nodes: int, prototypes: int, experts: int, top_k: int):
    per_node = prototypes * experts // nodes
    everything = list(choices(prototypes, experts, top_k))
    mean = sum(len({expert // per_node for expert in chosen}) for chosen in everything) / len(everything)
    assert nodes_of_token(nodes, per_node, prototypes, experts, top_k, 1.0) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("kept", [0.0, 0.25, 0.9])
def test_nodes_of_a_token_under_a_capacity(kept: float):
    expected = 0.0
    everything = list(choices(2, 4, 2))
    for chosen in everything:
        for survives in itertools.product((False, True), repeat=len(chosen)):
            probability = 1.0
            for one in survives:
                probability *= kept if one else 1 - kept
            left = {expert // 2 for expert, one in zip(chosen, survives, strict=True) if one}
            expected += probability * len(left)
    assert nodes_of_token(4, 2, 2, 4, 2, kept) == pytest.approx(expected / len(everything), rel=1e-12)


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


def test_ranks_of_one_node_send_nothing_to_others():
    config = MoEConfig(num_experts=16, num_prototypes=2)
    for step in exchange_traffic(config, 8, 100, 200, 8):
        assert step.near_peers == step.peers
        assert step.num_bytes(2, 2)[1] == step.messages[1] == 0
    assert exchange_traffic(config, 1, 100, 200, 8) == ()


def test_what_does_not_fit_is_refused_as_by_the_exchange():
    with pytest.raises(ValueError, match="ep_size 3 does not divide num_experts 16"):
        exchange_traffic(MoEConfig(num_experts=16), 3, 1, 1, 8)


@pytest.mark.parametrize("payload", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_row_are_those_of_its_encoding(payload: Payload, dtype: torch.dtype):
    rows = torch.randn(3, 24, dtype=dtype)
    for codec in CODECS[payload]:
        encoded = codec.encode(rows)
        assert codec.row_bytes(24, dtype.itemsize) * 3 == encoded.numel() * encoded.element_size()
