"""Where ranks lie: what is said of other placements, and that the assumed one sends the least between nodes."""

import itertools
from pathlib import Path

import pytest

from m6.config.run import RunConfig, parse_config
from m6.runs.environment import misplacement
from moe import MoEConfig
from moe.exchange_steps import exchange_steps
from moe.exchange_traffic import exchange_traffic
from tests.fixtures.tiny_run import tiny_document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("placement")


def run(folder: Path, ep_size: int, ranks_per_node: int | None = None) -> RunConfig:
    moe = {"num_experts": 8, "ranks_per_node": ranks_per_node}
    return parse_config(tiny_document(folder, train_batch_size=16, m6__training__ep_size=ep_size, m6__moe=moe))


@pytest.mark.parametrize("nodes", ["", "a", "aaaa", "aabb", "bbaa", "abcd", "aaaabbbb"])
def test_neighbours_on_each_node_are_what_is_assumed(folder: Path, nodes: str):
    assert misplacement(run(folder, 2), tuple(nodes)) is None
    assert misplacement(run(folder, 1), tuple(nodes)) is None


def test_other_placements_are_named(folder: Path):
    said = misplacement(run(folder, 2), tuple("abab"))
    assert said is not None
    assert said.startswith("node a has the ranks 0, 2, which are no neighbours; m6 plan assumes")
    assert "--distribution=block:block" in said
    assert said.endswith("; 2 of 2 groups of experts are on several nodes instead of 0")
    said = misplacement(run(folder, 1), tuple("abababababab"))
    assert said is not None
    assert said.startswith("node a has the ranks 0, 2, 4, 6, ..., which")
    assert "groups of experts" not in said
    said = misplacement(run(folder, 4), tuple("aaab"))
    assert said is not None
    assert said.startswith("node a has 3 ranks and node b has 1; ")
    assert said.endswith("; 1 of 1 groups of experts are on several nodes instead of 1")


def test_an_exchange_for_other_nodes_is_named(folder: Path):
    """Nodes of a domain may be joined as fast as the ranks of one, so that several nodes may count as one."""
    for ranks_per_node in (1, 2, 4):
        assert misplacement(run(folder, 4, ranks_per_node), tuple("aabb")) is None
    said = misplacement(run(folder, 8, 4), tuple("aaaaaabbbbbb"))
    assert said is not None
    assert said.startswith("m6.moe.ranks_per_node is 4, but nodes have 6 ranks; ")


CONFIGS = {
    "all-to-all": MoEConfig(num_experts=8, exchange="all_to_all"),
    "nodes first": MoEConfig(num_experts=8, num_prototypes=2, exchange="all_to_all", ranks_per_node=4),
    "nodes first, top 2": MoEConfig(num_experts=16, num_prototypes=2, top_k=2, ranks_per_node=4),
    "prototypes": MoEConfig(num_experts=8, num_prototypes=4, top_k=2, exchange="prototype", ranks_per_node=4),
    "capacity": MoEConfig(num_experts=8, num_prototypes=2, capacity_factor=1.0, ranks_per_node=2),
}
ROW_BYTES = 2 * 1024
WORLD = 8


def bytes_between_nodes(config: MoEConfig, ep_size: int, nodes: tuple[int, ...]) -> float:
    """Bytes of all ranks in one exchange: as in the closed form a step sends the same to each peer of its group."""
    tokens, total = 512.0, 0.0
    pairs = tokens * config.experts_per_token * config.kept_share
    steps = exchange_traffic(config, ep_size, tokens, pairs, ranks_per_node=1)
    stride = ep_size
    for step, traffic in zip(exchange_steps(config, ep_size), steps, strict=True):
        stride //= step.size
        everything = sum(traffic.num_bytes(ROW_BYTES, ROW_BYTES))
        for rank in range(WORLD):
            first = rank - rank // stride % step.size * stride
            group = [first + stride * number for number in range(step.size)]
            far = sum(nodes[peer] != nodes[rank] for peer in group)
            total += everything * far / traffic.peers
    return total


@pytest.mark.parametrize("ep_size", [2, 4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_placement_on_two_nodes_sends_less(name: str, ep_size: int):
    """All 70 of them. For the assumed one the planner's closed form says the same.

    With two choices of a token the step between nodes moves as many rows as the one inside of them would move if it
    were cut: then gates and positions decide, 0.2 % of the bytes.
    """
    config = CONFIGS[name]
    assumed = tuple(rank // 4 for rank in range(WORLD))
    placements = (
        tuple(int(rank in chosen) for rank in range(WORLD)) for chosen in itertools.combinations(range(WORLD), 4)
    )
    sent = {nodes: bytes_between_nodes(config, ep_size, nodes) for nodes in placements}
    assert sent[assumed] <= min(sent.values()) * (1.003 if config.experts_per_token == 2 else 1 + 1e-12)
    pairs = 512.0 * config.experts_per_token * config.kept_share
    steps = exchange_traffic(config, ep_size, 512.0, pairs, ranks_per_node=4)
    assert sent[assumed] == pytest.approx(WORLD * sum(step.num_bytes(ROW_BYTES, ROW_BYTES)[1] for step in steps))
    if ep_size < WORLD:
        assert sent[assumed] == 0 < max(sent.values())
    elif config.ranks_per_node is not None:  # a plain all-to-all of all ranks sends as much on any placement
        assert max(sent.values()) > 1.05 * sent[assumed]
