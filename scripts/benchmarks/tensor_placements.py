"""Elements that a rank receives for one feed-forward in 1-D, 2-D and 3-D: computed, and counted in running groups.

PYTHONPATH=. python scripts/benchmarks/tensor_placements.py

Four and eight gloo processes compute the pair of products forward and backward with each placement that has a grid of
them. They count what their collectives bring, and compare outputs and gradients with the whole product.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.nn import functional as F

from m6.architecture.communication_volume import PLACEMENTS, PlacementName, side, volume_of_feed_forward, volume_of_pair
from m6.model.placements import BY_NAME, Placement
from m6.training.mesh import own_group
from scripts.benchmarks.record import Recorder

# What it is, tokens of a micro-batch, hidden size, inner size.
SHAPES = (
    ("dense part of M6", 4096, 1024, 4096),
    ("one expert of m6t_1t", 18, 1024, 21248),
    ("dense M6-10B", 4096, 4096, 16384),
    ("GPT-3", 4096, 12288, 49152),
)
RANKS = (8, 64, 512)
COUNTED = ((64, 32, 128), (512, 256, 1024))
WORLDS = (4, 8)
TOLERANCE = 1e-12
"""Largest relative error in fp64."""


def computed(placement: PlacementName, ranks: int, tokens: int, hidden: int, inner: int) -> tuple[float, float] | None:
    """Elements of the pair alone, and with whole hidden states around it as runs have them; None without a grid."""
    if side(placement, ranks) is None:
        return None
    sizes = (placement, ranks, tokens, hidden, inner)
    return volume_of_pair(*sizes), volume_of_feed_forward(*sizes)


def keeping_gathered(ranks: int, tokens: int, hidden: int, inner: int) -> float:
    """Elements of the pair on a cube that keeps whole gathered operands: arXiv 2105.14450 as usually implemented."""
    q = side("3d", ranks)
    assert q is not None
    return 4 * (q - 1) * (tokens * hidden + hidden * inner + tokens * inner) / q**3


def _drawn(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator) / columns**0.5


def _compute(placement: Placement, rank: int, world: int, sizes: tuple[int, int, int]) -> tuple[int, float, float]:
    """What this rank receives, the largest relative error, and its share of the tensors kept for the backward pass."""
    tokens, hidden, inner = sizes
    whole = [_drawn(tokens, hidden, 0), _drawn(hidden, inner, 1), _drawn(inner, hidden, 2)]
    grad = _drawn(tokens, hidden, 3)
    for tensor in whole:
        tensor.requires_grad_()
    output = F.gelu(whole[0] @ whole[1]) @ whole[2]
    output.backward(grad)

    grid = placement.grid([list(range(world))], rank, lambda ranks: own_group(ranks, "tensor"))
    divisions = (placement.first.inputs, placement.first.matrix, placement.second.matrix)
    parts = [
        division.part(tensor.detach(), grid).clone().requires_grad_()
        for division, tensor in zip(divisions, whole, strict=True)
    ]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inner_part = placement.first(parts[0], parts[1], grid)
        found = placement.second(F.gelu(inner_part), parts[2], grid)
    last = placement.second.outputs
    found.backward(last.part(grad, grid).contiguous())
    errors = [_error(found.detach(), last.part(output.detach(), grid))]
    for part, tensor, division in zip(parts, whole, divisions, strict=True):
        assert part.grad is not None
        assert tensor.grad is not None
        errors.append(_error(part.grad, division.part(tensor.grad, grid)))
    everything = tokens * hidden + 2 * tokens * inner + 2 * hidden * inner
    return grid.received, max(errors), sum(kept.values()) / everything


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _run(rank: int, world: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for name in PLACEMENTS:
        for sizes in COUNTED if side(name, world) is not None else ():
            found: list[Any] = [None] * world
            dist.all_gather_object(found, _compute(BY_NAME[name], rank, world, sizes))
            if rank == 0:
                results.put((name, world, sizes, found))
    if rank == 0:
        results.put(None)
    dist.barrier()
    dist.destroy_process_group()


def _millions(elements: float) -> str:
    return f"{elements / 1e6:.2f} M"


def main() -> None:
    """Computes, counts and compares."""
    recorder = Recorder("tensor_placements", "Elements that a rank receives for a divided feed-forward")
    rows, numbers, wrong = [], [], []
    for name, *sizes in SHAPES:
        for ranks in RANKS:
            found = {placement: computed(placement, ranks, *sizes) for placement in PLACEMENTS}
            cells = ["" if each is None else f"{_millions(each[0])}, {_millions(each[1])}" for each in found.values()]
            one, cube = found["1d"], found["3d"]
            assert one is not None
            assert cube is not None
            ratios = f"{one[0] / cube[0]:.2f}, {one[1] / cube[1]:.2f}"
            kept = keeping_gathered(ranks, *sizes)
            kept_ratio = f"{_millions(kept)}, {one[0] / kept:.2f}"
            rows.append([f"{name}: {', '.join(map(str, sizes))}", str(ranks), *cells, ratios, kept_ratio])
            elements = {str(placement): each for placement, each in found.items()}
            numbers.append({"shape": sizes, "ranks": ranks, **elements, "3d, gathered operands kept": kept})
    counted = []
    context = torch.multiprocessing.get_context("spawn")
    for world in WORLDS:
        results = context.SimpleQueue()
        arguments = (world, 28000 + os.getpid() % 1000, results)
        processes = torch.multiprocessing.start_processes(
            _run, arguments, nprocs=world, join=False, start_method="spawn"
        )
        while (entry := results.get()) is not None:
            placement, _, sizes, found = entry
            received, error, share = {each[0] for each in found}, max(each[1] for each in found), found[0][2]
            formula = volume_of_pair(placement, world, *sizes)
            counted.append(
                {"placement": placement, "ranks": world, "shape": sizes, "received": sorted(received), "error": error}
                | {"formula": formula, "kept": share}
            )
            if received != {formula} or error > TOLERANCE:
                wrong.append(f"{placement} on {world} ranks")
        processes.join()
    lines = [
        f"{each['placement']} on {each['ranks']} ranks, shape {each['shape']}: counted "
        f"{', '.join(f'{number:,}' for number in each['received'])}, formula {each['formula']:,.0f}; largest error in "
        f"fp64 {each['error']:.0e}; a rank keeps {each['kept']:.3f} of the tensors for the backward pass"
        for each in counted
    ]
    notes = (
        "Shapes are tokens, hidden size, inner size; forward and backward pass. In each cell the first number is the "
        "pair of products alone, with inputs and outputs divided as the placement has them; the second one is a "
        "feed-forward between whole hidden states, as runs with `m6.parallel.tensor` have it. "
        "`1d / 3d` is the ratio of both. In 2d and 3d only parts are kept, and gathered again "
        "in the backward pass; the last column is a cube that keeps what it gathered, for the pair alone, and 1d over "
        "it: it receives less and keeps q times the operands.\n\n"
        "Counted by all ranks of running groups, equal on each of them:\n\n" + "\n".join(f"- {line}" for line in lines)
    )
    header = ["shape", "ranks", "1d", "2d", "3d", "1d / 3d", "3d, gathered operands kept"]
    recorder.write(header, rows, notes, {"computed": numbers, "counted": counted})
    if wrong:
        sys.exit(f"counted or computed otherwise: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
