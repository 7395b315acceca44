"""Sums of gradients that leave out parts of them: nothing is lost, all ranks have the same, bytes are as computed."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from m6.config.communication import CommunicationSettings
from m6.training.mesh import Mesh, ParallelDims
from m6.training.reduction.collectives import CountedCollectives
from m6.training.reduction.messages import GradientTensor, is_compressed, sent_bytes
from m6.training.reduction.reducer import Reducer
from tests.distributed.spawn import init_deepspeed, run_distributed

TENSORS = {
    "embeddings": GradientTensor((40, 8), 0),
    "matrix": GradientTensor((12, 10), 1),
    "small": GradientTensor((3, 4), 1),
    "bias": GradientTensor((50,), 1),
    "experts": GradientTensor((4, 6, 10), 2, is_stack=True),
    "expert biases": GradientTensor((4, 30), 2, is_stack=True),
}
# What each reducer compresses: no vectors, nothing small, and "chunks" not the embeddings.
COMPRESSED = {
    "top_k": {"embeddings", "matrix", "experts"},
    "chunks": {"matrix", "experts"},
    "powersgd": {"embeddings", "matrix", "experts"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "top_k": {"density": 0.05},
    "chunks": {"density": 0.4, "chunk_elements": 16},
    "powersgd": {"rank": 2},
}


def settings_of(reducer: str, **changes: Any) -> CommunicationSettings:
    options = {"dense_elements": 100, **OPTIONS[reducer], **changes}
    return CommunicationSettings(gradients=reducer, **options)


def reducer_of(settings: CommunicationSettings) -> tuple[Reducer, CountedCollectives]:
    collectives = CountedCollectives()
    return Reducer(settings, TENSORS, collectives, torch.zeros((), dtype=torch.float64)), collectives


def gradients_of(rank: int, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: scale * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        for name, tensor in TENSORS.items()
    }


def whole_sums(step: int) -> dict[str, Tensor]:
    ranks = [gradients_of(rank, step) for rank in range(dist.get_world_size())]
    return {name: torch.stack([each[name] for each in ranks]).sum(dim=0) for name in TENSORS}


def on_all_ranks(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def conservation() -> None:
    """sent + residuals = gradients, over several steps in fp64; 1e-12 allows for another order of the sums."""
    for name in OPTIONS:
        settings = settings_of(name)
        reducer, collectives = reducer_of(settings)
        assert set(reducer.residuals) == COMPRESSED[name]
        given = {key: torch.zeros(tensor.shape, dtype=torch.float64) for key, tensor in TENSORS.items()}
        sent = {key: torch.zeros_like(each) for key, each in given.items()}
        for step in range(5):
            before = {key: residual.clone() for key, residual in reducer.residuals.items()}
            mine = gradients_of(dist.get_rank(), step)
            for key, total in reducer({key: each.clone() for key, each in mine.items()}, step).items():
                sent[key] += total
                assert all(torch.equal(other, total) for other in on_all_ranks(total)), (name, key)
            for key, total in whole_sums(step).items():
                given[key] += total
            if name != "powersgd":  # elements are sent as they are or kept as they are, to the bit
                for key, rest in reducer.residuals.items():
                    waiting = mine[key] + before[key]
                    assert torch.equal(rest, torch.where(rest == 0, 0, waiting))
        for key, each in given.items():
            rest = torch.stack(on_all_ranks(reducer.residuals.get(key, torch.zeros_like(each)))).sum(dim=0)
            torch.testing.assert_close(sent[key] + rest, each, rtol=0, atol=1e-12)
            assert (rest != 0).any() == (key in COMPRESSED[name])  # the test has teeth: something was left out
        due = 5 * sent_bytes(list(TENSORS.values()), settings, settings.density_of(0), dist.get_world_size())
        assert in_fp32(collectives.sent_bytes, name, due)


def in_fp32(counted: float, name: str, due: float) -> bool:
    """Whether bytes of values in fp64 are those of fp32: all are doubled but indices, half of what top-k gathers."""
    indices = 0.0
    if name == "top_k":
        whole = [tensor for tensor in TENSORS.values() if not is_compressed(tensor, settings_of(name))]
        kept = due - 5 * sent_bytes(whole, settings_of(name), 1.0, dist.get_world_size())
        indices = kept / 2
    return counted == pytest.approx(2 * due - indices, rel=1e-12)


def at_density_1() -> None:
    """The bits of an all-reduce; also in a step of the warm-up, which sends what was left over."""
    for name in ("top_k", "chunks"):
        reducer, _ = reducer_of(settings_of(name, density=1.0))
        for step in range(2):
            mine = gradients_of(dist.get_rank(), step)
            expected = torch.cat([each.flatten() for each in mine.values()])
            dist.all_reduce(expected)
            found = reducer(mine, step)
            assert torch.equal(torch.cat([each.flatten() for each in found.values()]), expected)
    for name in OPTIONS:
        reducer, collectives = reducer_of(settings_of(name, warmup_steps=1))
        reducer.residuals["matrix"].fill_(float(dist.get_rank()))
        total = reducer(gradients_of(dist.get_rank(), 0), 0)["matrix"]
        ranks = dist.get_world_size()
        torch.testing.assert_close(total, whole_sums(0)["matrix"] + ranks * (ranks - 1) / 2)
        assert not any(residual.any() for residual in reducer.residuals.values())
        whole = sum(tensor.numel for tensor in TENSORS.values())
        assert collectives.sent_bytes == pytest.approx(2 * 8 * whole * (ranks - 1) / ranks)


def largest_first() -> None:
    """top_k sends the largest elements of a tensor, chunks the largest chunks of all; a dense rule is obeyed."""
    reducer, _ = reducer_of(settings_of("top_k"))
    mine = gradients_of(dist.get_rank(), 0)
    reducer({key: each.clone() for key, each in mine.items()}, 0)
    for key, rest in reducer.residuals.items():
        assert mine[key][rest == 0].abs().min() >= rest.abs().max()
    reducer, _ = reducer_of(settings_of("chunks"))
    found = reducer({key: each.clone() for key, each in mine.items()}, 0)
    squares = sum(
        torch.cat([chunk_squares(gradients_of(rank, 0)[key]) for key in reducer.residuals])
        for rank in range(dist.get_world_size())
    )
    is_sent = torch.cat([chunk_squares(found[key]) for key in reducer.residuals]) > 0
    assert squares[is_sent].min() > squares[~is_sent].max()
    # 8 chunks of the matrix and 15 of the experts
    assert is_sent.sum() == 10
    torch.testing.assert_close(found["embeddings"], whole_sums(0)["embeddings"])


def chunk_squares(tensor: Tensor) -> Tensor:
    flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % 16))
    return flat.view(-1, 16).square().sum(dim=1)


def low_rank() -> None:
    """The published recurrence (arXiv 1905.13727, algorithm 1) from the same Q, step by step."""
    reducer, _ = reducer_of(settings_of("powersgd"))
    ranks = range(dist.get_world_size())
    q = {key: factors.clone() for key, factors in reducer.factors().items()}
    errors = {key: [torch.zeros(TENSORS[key].shape, dtype=torch.float64) for _ in ranks] for key in q}
    for step in range(3):
        found = reducer(gradients_of(dist.get_rank(), step), step)
        for key in q:
            shape = TENSORS[key].matrices
            local = [(gradients_of(rank, step)[key] + errors[key][rank]).view(shape) for rank in ranks]
            mean = torch.stack(local).mean(dim=0)
            p = torch.linalg.qr(mean @ torch.linalg.qr(q[key]).Q).Q
            q[key] = mean.mT @ p
            approximation = p @ q[key].mT
            errors[key] = [(each - approximation).view(TENSORS[key].shape) for each in local]
            torch.testing.assert_close(found[key].view(shape), approximation * len(ranks))


def by_nodes() -> None:
    """Four ranks as two nodes of two: the sums of one exchange, and the bytes between nodes of the closed forms."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rank, dims = dist.get_rank(), ParallelDims(dist.get_rank(), 4)
    nodes = Mesh(dims, torch.device("cpu")).by_nodes(dims.ranks("dp"))
    assert nodes is not None
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(4, 25, 4, generator=generator, dtype=torch.float64)
    rank_values = torch.stack(on_all_ranks(values))
    mine = values.nbytes
    # Bytes to the other node of a rank: of a ring of two ranks, half of it, or the message to one rank instead of two.
    for call, expected, between in (
        (lambda each: each.all_reduce(values.clone()), None, mine / 2),
        (lambda each: next(each.sums([values[0, 1:], values[1]])), rank_values.sum(0)[0, 1:], (24 + 25) * 32 / 2),
        (lambda each: each.reduce_scatter(values.view(4, 100)), rank_values.sum(0)[rank].view(100), mine / 2 / 2),
        (lambda each: torch.stack(each.all_gather(values)), rank_values, mine),
    ):
        flat, hierarchical = CountedCollectives(), CountedCollectives(None, nodes)
        with messages_between_nodes() as counted:
            found = call(hierarchical)
        assert counted
        assert sum(counted) == hierarchical.sent_between_nodes == between
        with messages_between_nodes() as counted:
            alike = call(flat)
        assert hierarchical.sent_bytes == flat.sent_bytes
        assert flat.sent_between_nodes == 0
        assert counted == [math.inf]
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
            torch.testing.assert_close(alike, expected, rtol=0, atol=1e-14)
    on_other_nodes = CountedCollectives(None, None, 1.0)
    on_other_nodes.all_reduce(values.clone())
    on_other_nodes.count_ring(8.0)
    assert on_other_nodes.sent_between_nodes == on_other_nodes.sent_bytes == mine * 3 / 2 + 8
    for length in (1, 2, 3, 7):  # no multiple of the ranks of a node
        total = torch.full((length,), 1.0 + rank)
        CountedCollectives(None, nodes).all_reduce(total)
        assert total.tolist() == [10.0] * length
    for name in OPTIONS:
        settings = settings_of(name)
        sums = []
        for collectives in (CountedCollectives(), CountedCollectives(None, nodes, 0.5)):
            reducer = Reducer(settings, TENSORS, collectives, torch.zeros((), dtype=torch.float64))
            for step in range(3):
                found = reducer(gradients_of(rank, step), step)
            sums.append((found, collectives.sent_bytes))
        for key, total in sums[0][0].items():
            torch.testing.assert_close(sums[1][0][key], total, rtol=0, atol=1e-12)
        assert sums[0][1] == pytest.approx(sums[1][1], rel=1e-12)
        assert 0 < collectives.sent_between_nodes < collectives.sent_bytes / 2


@contextmanager
def messages_between_nodes() -> Iterator[list[float]]:
    """Yields the bytes that this rank sends to other nodes inside; infinite for a group that mixes both kinds."""
    found: list[float] = []

    def count(tensor: Tensor, group: dist.ProcessGroup | None, times: Callable[[int], float]) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        on_nodes = {rank // 2 for rank in ranks}
        if len(on_nodes) > 1:
            found.append(tensor.nbytes * times(len(ranks)) if len(on_nodes) == len(ranks) else math.inf)

    plain = dist.all_reduce, dist.reduce_scatter_single, dist.all_gather

    def all_reduce(tensor: Tensor, group: Any) -> None:
        count(tensor, group, lambda ranks: 2 * (ranks - 1) / ranks)
        plain[0](tensor, group=group)

    def reduce_scatter(own: Tensor, tensor: Tensor, group: Any) -> None:
        count(tensor, group, lambda ranks: (ranks - 1) / ranks)
        plain[1](own, tensor, group=group)

    def all_gather(received: list[Tensor], tensor: Tensor, group: Any) -> None:
        count(tensor, group, lambda ranks: ranks - 1)
        plain[2](received, tensor, group=group)

    with mock.patch.multiple(dist, all_reduce=all_reduce, reduce_scatter_single=reduce_scatter, all_gather=all_gather):
        yield found


CHECKS: list[Callable[[], None]] = [conservation, at_density_1, largest_first, low_rank]


def all_checks() -> None:
    init_deepspeed()
    for check in CHECKS:
        check()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_reducers(ranks: int):
    run_distributed(all_checks, ranks)


def checks_by_nodes() -> None:
    init_deepspeed()
    by_nodes()


def test_node_first_sums_send_fewer_bytes_between_nodes():
    run_distributed(checks_by_nodes, 4)


def test_warm_up_of_the_density():
    settings = settings_of("top_k", density=0.01, warmup_steps=4)
    assert [settings.density_of(step) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.1, 0.01, 0.01])
    assert settings_of("top_k").density_of(0) == 0.05


def test_sparse_elements_that_would_take_more_bytes_are_sent_whole():
    """An element takes 8 bytes for each other rank, against 8 bytes for all of them: the limit is 1 / ranks."""
    tensors = [TENSORS["embeddings"]]
    whole = sent_bytes(tensors, settings_of("top_k"), 1.0, 4)
    assert sent_bytes(tensors, settings_of("top_k"), 0.25, 4) == whole == 2 * 320 * 4 * 3 / 4
    assert sent_bytes(tensors, settings_of("top_k"), 0.24, 4) == 77 * 8 * 3 < whole
