"""Coordinates of ranks and groups of processes: against PyTorch's own mesh, and nowhere else in the code."""

import ast
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from m6.training.fake_world import fake_process_group
from m6.training.mesh import Mesh, ParallelDims, divide_by_nodes, share_between_nodes
from tests.distributed.spawn import run_distributed

ROOT = Path(__file__).resolve().parents[3]
Dim = Literal["pp", "dp", "tp"]


@st.composite
def worlds(draw: st.DrawFn) -> list[ParallelDims]:
    """The coordinates of all ranks of a world."""
    pp, edp, ep, tp = (draw(st.integers(1, 4)) for _ in range(4))
    size = pp * edp * ep * tp
    return [ParallelDims(rank, size, pp, tp, ep) for rank in range(size)]


@given(world=worlds())
def test_every_rank_has_a_place_of_its_own(world: list[ParallelDims]):
    first = world[0]
    shape = (first.pp, first.dp, first.tp)
    by_coordinates = torch.arange(len(world)).view(shape)
    for dims in world:
        place = (dims.pp_rank, dims.dp_rank, dims.tp_rank)
        assert by_coordinates[place] == dims.rank
        assert dims.model_rank == by_coordinates[:, dims.dp_rank].flatten().tolist().index(dims.rank)
        assert dims.is_data_leader == (dims.rank in by_coordinates[0, :, 0])
        for pp_rank in range(dims.pp):
            assert dims.rank_of_stage(pp_rank) == by_coordinates[pp_rank, dims.dp_rank, dims.tp_rank]
        part, place_in_part = dims.part(dims.ep)
        assert part < dims.dp // dims.ep
        assert part * dims.ep + place_in_part == dims.dp_rank
    for axis, dim in enumerate(get_args(Dim)):
        lines = by_coordinates.movedim(axis, -1).reshape(-1, shape[axis]).tolist()
        assert sorted(first.ranks(dim)) == sorted(lines)


@given(world=worlds(), numel=st.integers(0, 1000))
def test_shares_of_a_stage_are_everything_once(world: list[ParallelDims], numel: int):
    for stage in world[0].stages():
        assert {world[rank].pp_rank for rank in stage} == {world[stage[0]].pp_rank}
        bounds = [world[rank].share(numel) for rank in stage]
        assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == numel
    assert sum(map(len, world[0].stages())) == len(world)


def groups_are_those_of_a_device_mesh(sizes: list[tuple[int, int]]) -> None:
    rank, world_size = 5, 8
    for pp, tp in sizes:
        with fake_process_group(rank, world_size):
            dims = ParallelDims(rank, world_size, pp, tp)
            mesh = Mesh(dims, torch.device("cpu"))
            names = mesh.device_mesh.mesh_dim_names
            assert names is not None
            assert set(names) == {"dp", *(name for name, size in (("pp", pp), ("tp", tp)) if size > 1)}
            coordinates = {"pp": dims.pp_rank, "dp": dims.dp_rank, "tp": dims.tp_rank}
            for name in names:
                own = next(ranks for ranks in dims.ranks(name) if rank in ranks)  # type: ignore[arg-type]
                assert dist.get_process_group_ranks(mesh.device_mesh.get_group(name)) == own
                assert mesh.device_mesh.get_local_rank(name) == coordinates[name]
            if pp * tp == 1:
                assert mesh.replicas is None
            else:
                assert mesh.replicas is mesh.device_mesh.get_group("dp")
                assert mesh.install() is mesh
            assert Mesh(dims, torch.device("cpu")).device_mesh is mesh.device_mesh, "an engine that is built again"


def test_the_groups_are_those_of_a_device_mesh():
    """In a process of its own: others of this one's tests have a group of processes."""
    run_distributed(groups_are_those_of_a_device_mesh, 1, [(1, 1), (2, 1), (4, 1), (1, 2), (1, 8), (2, 2)])


MAKERS = {"new_group", "init_device_mesh", "split_group", "new_subgroups", "new_subgroups_by_enumeration"}
ALLOWED = {
    "moe/process_groups.py": "moe knows no m6; every group but those of the device mesh comes from its function",
    "m6/training/mesh.py": "the mesh itself",
    "m6/slurm/sniff.py": "measures the network between two ranks, outside of any run",
}
CALLERS = {"moe/expert_parallel.py", "m6/training/mesh.py"}
"""Who calls ``moe.process_groups.group_of``: experts exchange tokens in groups of their own, others ask the mesh."""


def sources() -> list[tuple[str, ast.AST]]:
    files = [file for package in ("m6", "moe", "offload") for file in sorted((ROOT / package).rglob("*.py"))]
    return [(str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_ranks_by_nodes():
    """Only where nodes have the same number of ranks, two or more, and there are several nodes."""
    assert divide_by_nodes(range(4), 2) == [[0, 1], [2, 3]]
    assert divide_by_nodes([1, 3, 5, 7], 4) == [[1, 3], [5, 7]]
    assert [share_between_nodes(range(4), each) for each in (1, 2, 4)] == [1.0, 0.5, 0.0]
    assert share_between_nodes([0, 2], 2) == 1.0
    assert share_between_nodes([1, 3, 5], 4) == 2 / 3
    assert divide_by_nodes(range(4), 4) == divide_by_nodes(range(6), 4) == divide_by_nodes([0, 2], 2) == []
    dims = ParallelDims(0, 16, pp=2, ep=4)
    assert dims.copies_of_experts()[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_groups_are_made_in_one_place():
    made = {file for file, tree in sources() for node in ast.walk(tree) if name_of(node) in MAKERS}
    assert made == set(ALLOWED)
    called = {
        file
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name_of(node.func) == "group_of"
    }
    assert called == CALLERS


def test_ranks_are_divided_in_one_place():
    """``rank // n`` and ``rank % n`` of the training are coordinates, which the mesh knows."""
    found = [
        f"{file}:{node.lineno}"
        for file, tree in sources()
        for node in ast.walk(tree)
        if file.startswith("m6/training/") and file != "m6/training/mesh.py"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod)
        if any(name_of(part).endswith("rank") for part in ast.walk(node.left))
    ]
    assert not found
