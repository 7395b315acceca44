"""Descriptions of machines: the shipped ones, and every kind of mistake in one.

The cluster that a process runs on.

Prices of collectives against a replay over every pair of ranks.
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m6.errors import UserError
from m6.planning.machine.cluster import (
    CLUSTERS,
    Cluster,
    collective_s,
    contiguous_group,
    detect_cluster,
    load_cluster,
    strided_group,
)
from m6.planning.machine.profile import CollectivePoint, Profile

SHIPPED = {
    "v100_32g_x128": 128,
    "v100_32g_x480": 480,
    "v100_32g_x512": 512,
    "a100_80g_x128": 128,
    "h100_x128": 128,
    "h200_x128": 128,
    "b200_x128": 128,
    "b300_x128": 128,
    "gb200_x72": 72,
    "gb300_x72": 72,
    "a100_v100_mixed": 128,
    "cpu_laptop": 2,
}


def test_every_shipped_cluster_is_listed_and_says_where_its_figures_come_from():
    assert {path.stem for path in CLUSTERS.glob("*.json")} == set(SHIPPED)
    for name, num_devices in SHIPPED.items():
        cluster = load_cluster(Path(name))
        assert cluster.num_devices == num_devices
        for kind in cluster.nodes:
            links = [link for link in (kind.links.device, kind.links.network, kind.links.host) if link is not None]
            assert all(part.source for part in (kind.device, kind.host, *links))


def test_a_type_without_matrix_units_runs_at_the_rate_of_fp32():
    device = load_cluster(Path("v100_32g_x512")).nodes[0].device
    assert device.flops("bf16") == device.flops("fp32") < device.flops("fp16")


def test_the_worst_node_of_a_mixture_decides():
    mixed = load_cluster(Path("a100_v100_mixed"))
    assert mixed.is_mixed
    assert mixed.smallest.device.name == mixed.slowest("bf16").device.name == "V100"


def test_a_part_of_a_cluster():
    cluster = load_cluster(Path("a100_v100_mixed"))
    assert [kind.num_devices for kind in cluster.first(72).nodes] == [64, 8]
    assert [(kind.count, kind.devices_per_node) for kind in cluster.first(4).nodes] == [(1, 4)]
    assert cluster.resized(1024).num_devices == 1024
    with pytest.raises(UserError, match="136 devices: 64 x A100 80 GB and 64 x V100 32 GB has 128"):
        cluster.scaled(136)


def test_a_cluster_of_more_nodes():
    cluster = load_cluster(Path("h100_x128"))
    assert (cluster.scaled(512).num_devices, cluster.scaled(512).name) == (512, "128 x H100, scaled up")
    assert cluster.scaled(64) == cluster.first(64)
    with pytest.raises(UserError, match="1001 devices are not a whole number of nodes of 8"):
        cluster.scaled(1001)
    with pytest.raises(UserError, match=r"4 devices: .* is one node without a network"):
        load_cluster(Path("cpu_laptop")).scaled(4)


def test_the_device_link_joins_the_nodes_of_a_domain():
    rack = load_cluster(Path("gb200_x72"))
    assert rack.nodes[0].devices_per_domain == 72
    assert rack.first(16).nodes[0].devices_per_domain == 16
    assert rack.scaled(144).nodes[0].devices_per_domain == 72
    assert load_cluster(Path("b200_x128")).nodes[0].devices_per_domain == 8


def test_parts_that_are_no_whole_nodes():
    cluster = load_cluster(Path("a100_v100_mixed"))
    with pytest.raises(UserError, match="has nodes of 8; take whole nodes"):
        cluster.first(12)
    with pytest.raises(UserError, match=r"129 devices: .* has 128"):
        cluster.first(129)


def document() -> dict[str, Any]:
    return json.loads((CLUSTERS / "v100_32g_x512.json").read_text())


def broken(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = node = document()
    for key in path[:-1]:
        node = node[key]
    if value is None:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes", 0, "device", "memory_byte"), 1, 'nodes.0.device.memory_byte: unknown key; did you mean "memory_b'),
        (("nodes", 0, "device", "memory_bytes"), "32GB", "nodes.0.device.memory_bytes: .* found '32GB'"),
        (("nodes", 0, "device", "memory_bytes"), -1, "greater than 0, found -1"),
        (("nodes", 0, "device", "matmul_flops"), {"fp32": 1.0, "bf15": 1.0}, "unknown data type 'bf15'; did you"),
        (("nodes", 0, "device", "grouped_dtypes"), ["bf15"], "grouped_dtypes: unknown data type 'bf15'; did you"),
        (("nodes", 0, "device", "matmul_flops"), {"bf16": 1.0}, '"fp32" is missing'),
        (("nodes", 0, "links", "network"), None, "nodes.0.links.network: missing, but there are 64 nodes"),
        (("nodes", 0, "links", "device"), None, "nodes.0.links.device: missing, but it would join 8 devices"),
        (("nodes",), [], "nodes: .* at least 1"),
        (("name",), None, "name: missing"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str):
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(broken(path, value)))
    with pytest.raises(UserError, match=message) as raised:
        load_cluster(file)
    assert str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)


def test_unknown_names_and_unreadable_files(tmp_path: Path):
    with pytest.raises(UserError, match='did you mean "v100_32g_x512"'):
        load_cluster(Path("v100_32g_512"))
    with pytest.raises(UserError, match="no such file"):
        load_cluster(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        load_cluster(tmp_path / "bad.json")
    assert isinstance(load_cluster(CLUSTERS / "cpu_laptop.json"), Cluster)


def test_the_machine_at_hand(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="CPU core has no network"):
        detect_cluster(4)
    assert detect_cluster(2).num_devices == 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Quantum 9")
    with pytest.raises(UserError, match="device 'Quantum 9' is in no description"):
        detect_cluster(2)


@pytest.mark.parametrize(
    ("name", "device"),
    [("NVIDIA GB200", "GB200"), ("NVIDIA GB300", "GB300"), ("NVIDIA B200", "B200"), ("NVIDIA H100 80GB HBM3", "H100")],
)
def test_the_description_of_the_device_itself(name: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """The name of a B200 is a part of that of a GB200, whose nodes and links are others."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=10**11))
    [nodes] = detect_cluster(4).nodes
    assert nodes.device.name == device


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
