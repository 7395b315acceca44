"""The sniff test of GPUs and links, on four ranks that stand for two nodes."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from m6.runs.processes import Runtime
from m6.slurm import sniff
from m6.slurm.sniff import neighbours, outliers, report
from tests.distributed.spawn import run_distributed


def measure_on_two_nodes(folder: Path) -> None:
    from m6.runs.processes import start
    from m6.slurm.sniff import main, matmul_flops, measure

    runtime = start()
    node = f"n{1 + runtime.rank // 2}"
    speeds = measure(runtime, node, matmul_flops(runtime.device))
    (folder / f"rank_{runtime.rank}").write_text(json.dumps(speeds))
    os.environ |= {"SLURMD_NODENAME": node, "SNIFF_TOLERANCE": "1"}
    sys.argv = ["sniff", str(folder)]
    main()


def test_all_ranks_agree_on_the_speeds_of_all_nodes(tmp_path: Path):
    run_distributed(measure_on_two_nodes, 4, tmp_path)
    texts = {(tmp_path / f"rank_{rank}").read_text() for rank in range(4)}
    assert len(texts) == 1
    assert (tmp_path / "sniffed").exists(), "preflight believes no test that has not ended"
    assert {file.name for file in (tmp_path / "products").iterdir()} == {"n1.0", "n1.1", "n2.2", "n2.3"}
    speeds = json.loads(texts.pop())
    assert set(speeds) == {"matmul in TFLOP/s", "exchange in GB/s"}
    for by_node in speeds.values():
        assert set(by_node) == {"n1", "n2"}
        assert min(by_node.values()) > 0


def test_all_groups_exist_before_a_link_is_measured(monkeypatch: pytest.MonkeyPatch):
    """All ranks wait for each other in new_group: disjoint pairs would be measured one after the other."""
    calls: list[object] = []

    def gathered(of_all: list[object], own: object) -> None:
        of_all[:] = ["a", "b", "c", "d"] if isinstance(own, str) else [own] * 4

    monkeypatch.setattr(sniff.dist, "all_gather_object", gathered)
    monkeypatch.setattr(sniff.dist, "new_group", lambda ranks: calls.append("group") or ranks)
    monkeypatch.setattr(sniff, "exchange_bytes_per_s", lambda group, device: calls.append(group) or 1e9)
    sniff.measure(Runtime(1, 4, 0, torch.device("cpu")), "b", 1e12)
    assert calls == ["group"] * 3 + [[0, 1], [1, 2]]


def test_who_falls_behind():
    speeds = {"n1": 100.0, "n2": 91.0, "n3": 89.0, "n4": 101.0, "n5": 100.0}
    assert outliers(speeds, 0.1) == {"n3": 89.0}


def test_every_node_meets_both_neighbours():
    assert neighbours(["a", "b", "c", "d"]) == [("a", "b"), ("c", "d"), ("b", "c")]
    assert neighbours(["a", "b", "c"]) == [("a", "b"), ("b", "c")]
    assert neighbours(["a"]) == [("a",)]


@pytest.mark.parametrize("tolerance", [0.1, 0.5])
def test_the_report_of_a_slow_node(tmp_path: Path, tolerance: float):
    for node in ("n1", "n2", "n3"):
        (tmp_path / f"{node}.txt").write_text("ok\n")
    report(tmp_path, {"matmul in TFLOP/s": {"n1": 400.0, "n2": 300.0, "n3": 402.0}}, tolerance)
    slow = "matmul in TFLOP/s: 300, the median of the nodes is 400\n" if tolerance < 0.25 else "ok\n"
    assert [(tmp_path / f"{node}.txt").read_text() for node in ("n1", "n2", "n3")] == ["ok\n", slow, "ok\n"]
