"""``"deterministic": "any_world"``: the same weights and moments to the bit on 1, 2, 3 and 4 ranks."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from m6.checkpoints.comparison import compare, open_step
from m6.config.sum_tree import TreeShape
from m6.training.engine import tree_gradients
from m6.training.engine.tree_gradients import sum_over_ranks
from m6.training.mesh import Mesh, ParallelDims
from m6.training.reporting.sums import sum_of_all
from tests.distributed.chosen import cases
from tests.distributed.spawn import run_distributed
from tests.distributed.test_training_layouts import MUON, ROUTING, layout, train

Worlds = list[tuple[int, int, int | None]]
"""(ranks, ZeRO stage, steps in all after which the attempt stops), one after the other."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any_world")


def trained(folder: Path, name: str, worlds: Worlds, ep_size: int = 1, by_nodes: bool = False, **changes: Any) -> Path:
    """A run over these attempts; ``by_nodes``: all of whose sums are by nodes first."""
    root = folder / name
    for ranks, stage, stop_at in worlds:
        document = layout(folder, ranks, stage, ep_size, m6__training__deterministic="any_world", **changes)
        function = train_by_nodes if by_nodes else train_in_any_precision
        run_distributed(function, ranks, document, str(root), stop_at)
    return root


def train_in_any_precision(*arguments: Any) -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True  # type: ignore[method-assign]
    train(*arguments)


def train_by_nodes(*arguments: Any) -> None:
    def checked(branches: Any, shape: Any, group: Any, device: Any, nodes: Any = None) -> list[Tensor]:
        assert nodes is not None
        return sum_over_ranks(branches, shape, group, device, nodes)

    with mock.patch.object(tree_gradients, "sum_over_ranks", checked):
        train_in_any_precision(*arguments)


def assert_equal_to_the_bit(run: Path, reference: Path) -> None:
    found = compare(*open_step((run, reference), None))
    assert found.differences == []
    assert found.digests[0] == found.digests[1]
    assert training_losses(run) == training_losses(reference)


def training_losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


EVERY_OPTION = "experts with every option"
AUTOCAST = "12 micro-batches under autocast"
LATE, OFFLOADED = "gradients one step late", "offloaded experts one step late"
CASES: dict[str, dict[str, Any]] = {
    # dropout, clipping, capacity with dropped tokens, biases that balance: all are functions of a micro-batch
    EVERY_OPTION: {"m6__moe": ROUTING},
    AUTOCAST: {
        "train_batch_size": 24,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    },
    "shared layers": {"m6__pseudo_to_real": {"switch_step": 2}},
    "a batch that grows": {
        "train_batch_size": 24,
        "m6__training__batch_ramp": [{"steps": 1, "batch_size": 8}, {"steps": 1, "batch_size": 16}],
    },
    LATE: {"m6__gradient_delay": {"accept_loss": True}},
    OFFLOADED: {
        "m6__offload": {"device_budget_mib": 5000.0, "chunk_mib": 0.001},
        "m6__gradient_delay": {"accept_loss": True},
    },
}


@pytest.mark.parametrize(
    "name",
    [
        EVERY_OPTION,
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("shared layers", "a batch that grows", OFFLOADED)),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.nightly]) for name in (AUTOCAST, LATE)),
    ],
)
def test_weights_do_not_depend_on_the_number_of_ranks(folder: Path, name: str):
    changes = CASES[name]
    alone = trained(folder, f"{name} alone", [(1, 0, None)], **changes)
    # Three ranks have parts of unequal lengths, which the plan of offloaded experts does not know.
    some = 2 if "m6__offload" in changes else 3
    assert_equal_to_the_bit(trained(folder, f"{name} some", [(some, 0, None)], **changes), alone)
    # Stage 1 adds up the same gradients, and a run that changes its size takes over the state of any layout.
    worlds: Worlds = [(4, 1, 1), (some, 1, 2), (1, 1, 3), (4, 0, None)]
    assert_equal_to_the_bit(trained(folder, f"{name} wandering", worlds, **changes), alone)


HALF: dict[str, dict[str, Any]] = {
    "bf16 and Muon": {"bf16": {"enabled": True}, **MUON},
    # A scale so large that the first steps are skipped.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(HALF, {"bf16 and Muon"}))
def test_in_16_bits(folder: Path, name: str):
    """They need stage 1. Muon makes matrices orthogonal that partitions of other numbers of ranks cut elsewhere."""
    changes = HALF[name]
    alone = trained(folder, f"{name} alone", [(1, 1, None)], **changes)
    worlds: Worlds = [(4, 1, 1), (2, 1, 3), (4, 1, None)]
    assert_equal_to_the_bit(trained(folder, f"{name} wandering", worlds, **changes), alone)


@pytest.mark.slow
def test_experts_on_two_ranks(folder: Path):
    changes: dict[str, Any] = {"m6__moe": ROUTING, "train_batch_size": 16}
    two = trained(folder, "experts on two", [(2, 0, None)], ep_size=2, **changes)
    assert_equal_to_the_bit(trained(folder, "experts on four", [(4, 1, 2), (2, 1, 3), (4, 0, None)], 2, **changes), two)


@pytest.mark.slow
def test_offloaded_experts_under_any_budget(folder: Path):
    """Budgets differ from attempt to attempt: experts that stream, experts that the device owns, and a plan between."""
    document: dict[str, Any] = {"m6__moe": {"num_experts": 4, "num_prototypes": 2}, "train_batch_size": 16}
    streamed = {"chunk_mib": 0.001, "rules": [{"kind": "expert", "place": "stream"}], "device_budget_mib": 5000.0}
    alone = trained(folder, "streamed", [(1, 0, None)], m6__offload=streamed, **document)
    run = "offloaded wandering"
    owned = {"chunk_mib": 0.05, "device_budget_mib": 6000.0}
    trained(folder, run, [(4, 1, 1), (2, 1, 2)], m6__offload=owned, **document)
    trained(folder, run, [(2, 0, None)], m6__offload=streamed, **document)
    assert_equal_to_the_bit(folder / run, alone)


def sum_over_a_group() -> None:
    """Each rank sums over itself alone."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = [dist.new_group([each]) for each in range(2)][rank]
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0 + rank]], dtype=torch.float64)
    for exact in (True, False):
        assert sum_of_all(values, exact, group) == [4.0, 6.0 + rank]


def test_exact_sums_are_those_of_the_group() -> None:
    run_distributed(sum_over_a_group, 2)


def sum_with_nodes() -> None:
    """Four ranks as two nodes: the bits of one exchange, and the bytes between nodes of the closed forms."""
    dist.init_process_group("gloo")
    rank, cpu = dist.get_rank(), torch.device("cpu")
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dims = ParallelDims(rank, 4)
    nodes = Mesh(dims, cpu).by_nodes(dims.ranks("dp"))
    assert nodes is not None
    sent: list[int] = []
    all_to_all, all_gather = dist.all_to_all_single, dist.all_gather

    def elsewhere(group: dist.ProcessGroup | None) -> list[int]:
        """The positions in a group of the ranks on other nodes."""
        return [place for place, each in enumerate(dist.get_process_group_ranks(group)) if each // 2 != rank // 2]

    def counted_all_to_all(found: Tensor, values: Tensor, held: Any, given: list[int], group: Any) -> None:
        sent.append(sum(given[place] for place in elsewhere(group)) * values[0].nbytes)
        all_to_all(found, values, held, given, group=group)

    def counted_all_gather(found: list[Tensor], values: Tensor, group: Any) -> None:
        sent.append(len(elsewhere(group)) * values.nbytes)
        all_gather(found, values, group=group)

    numel = 8000
    generator = torch.Generator().manual_seed(rank)
    # Shares; bytes that a rank sends to the other node, in quarters of a gradient, by one exchange and by nodes first.
    for shares, size, direct, by_nodes in (
        ((1, 1, 1, 1), 1, 2 + 2, 1 + 1),
        ((2, 2, 2, 2), 1, 2 + 2, 1 + 1),
        # Two columns, whose sums no rank can add up before those of the other node are there.
        ((1, 1), 2, 2 + 2, 2 + 1),
        # Three branches for each node: leaves 0, 1 and 2 of five, and so on.
        ((1, 2, 1, 1), 1, None, None),
    ):
        shape = TreeShape(shares, size)
        branches = [
            [torch.randn(numel - 10, generator=generator), torch.randn(2, 5, generator=generator)]
            for _ in shape.branches[rank // size]
        ]
        found = []
        with (
            mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
            mock.patch.object(dist, "all_gather", counted_all_gather),
        ):
            for each, quarters in ((None, direct), (nodes, by_nodes)):
                sent.clear()
                found.append(sum_over_ranks([[t.clone() for t in own] for own in branches], shape, None, cpu, each))
                if quarters is not None:
                    assert sum(sent) == quarters * numel // 4 * 4, (shares, size, each, sent)
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        whole = [branch[1].double() for branch in branches]
        exact = torch.stack(whole).sum(0)
        dist.all_reduce(exact)
        torch.testing.assert_close(found[1][1].double(), exact, rtol=0, atol=1e-5)


def test_sums_of_nodes_first_send_fewer_bytes_between_nodes() -> None:
    run_distributed(sum_with_nodes, 4)


@pytest.mark.slow
def test_nodes_do_not_change_the_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trained(folder, "without nodes", [(1, 0, None)])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert_equal_to_the_bit(trained(folder, "two nodes", [(4, 1, 2), (4, 0, None)], by_nodes=True), alone)
