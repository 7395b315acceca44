"""Prices of collectives against a replay over every pair of ranks."""

import itertools
from pathlib import Path

import pytest

from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.machine.collectives import collective_s, contiguous_group, strided_group
from m6.planning.machine.profile import CollectivePoint, Profile

PERFECT = Profile(bandwidth_efficiency=1.0, link_efficiency=1.0, matmul_efficiency=1.0, kernel_s=0.0)


def a100(num_devices: int = 128) -> Cluster:
    return load_cluster(Path("a100_80g_x128")).first(num_devices)


@pytest.mark.parametrize(("size", "stride"), [(16, 8), (8, 16), (64, 2), (32, 4), (128, 1)])
def test_ranks_of_a_strided_group_that_share_a_node(size: int, stride: int):
    nodes = a100().nodes[0]
    ranks = [index * stride for index in range(size)]
    counts = [len(list(group)) for _, group in itertools.groupby(ranks, lambda rank: rank // nodes.devices_per_node)]
    group = strided_group(size, stride, nodes)
    assert (group.per_node, group.num_nodes) == (counts[0], len(counts))


def test_all_reduce_between_nodes_moves_each_byte_once_through_the_network():
    nodes = a100().nodes[0]
    everyone, num_bytes = contiguous_group(128, nodes), 1e9
    network, inside = 200e9, 300e9
    # The ring over 16 nodes moves 2 x 15/16 of the bytes through each node's ports, whichever device holds them.
    expected = 2 * (num_bytes * 15 / 16 / network + num_bytes * 7 / 8 / inside + 7 * 2e-5)
    assert collective_s("all_reduce", num_bytes, everyone, nodes, PERFECT) == pytest.approx(expected)
    assert collective_s("all_gather", num_bytes, everyone, nodes, PERFECT) == pytest.approx(expected / 2)
    assert collective_s("all_reduce", num_bytes, contiguous_group(1, nodes), nodes, PERFECT) == 0


def test_measured_collectives_come_first():
    points = [
        CollectivePoint(kind="all_reduce", tier="network", ranks=128, num_bytes=b, seconds=1e-3 + b * 1e-9)
        for b in (1 << 10, 1 << 20, 1 << 30)
    ]
    profile = PERFECT.model_copy(update={"collectives": points})
    nodes = a100().nodes[0]
    found = collective_s("all_reduce", 1 << 28, contiguous_group(128, nodes), nodes, profile)
    assert found == pytest.approx(1e-3 + 2**28 * 1e-9, rel=1e-2)
