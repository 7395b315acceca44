"""Placements of matrices on grids of ranks: dense results, counted elements, and a rank's part of what is kept."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from m6.architecture.communication_volume import volume_of_pair
from m6.architecture.settings import ModelSettings
from m6.model.outputs import Head
from m6.model.placements import BY_NAME
from m6.model.tensor import DividedHead
from m6.training.mesh import own_group
from tests.distributed.spawn import run_distributed

pytestmark = pytest.mark.slow

TOKENS, HIDDEN, INNER = 64, 32, 128
# Sums of other blocks: rounding errors of a few units in the last place.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


def dense(dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs, weights, an output's gradient, and what one rank computes of them."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, dtype=dtype, generator=generator) / columns**0.5

    tensors = {"x": draw(TOKENS, HIDDEN), "a": draw(HIDDEN, INNER), "b": draw(INNER, HIDDEN)}
    for tensor in tensors.values():
        tensor.requires_grad_()
    output = F.gelu(tensors["x"] @ tensors["a"]) @ tensors["b"]
    grad = draw(TOKENS, HIDDEN)
    output.backward(grad)
    gradients = {f"grad of {name}": tensor.grad for name, tensor in tensors.items()}
    return {**{name: each.detach() for name, each in tensors.items()}, "y": output.detach(), "grad": grad, **gradients}


def compare_with_dense(names: list[str], tensor_ranks: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [list(range(first, first + tensor_ranks)) for first in range(0, world, tensor_ranks)]
    for name in names:
        placement = BY_NAME[name]
        grid = placement.grid(groups, rank, lambda ranks: own_group(ranks, "tensor"))
        divisions = {
            "x": placement.first.inputs,
            "a": placement.first.matrix,
            "b": placement.second.matrix,
            "y": placement.second.outputs,
        }
        for dtype, tolerance in TOLERANCES.items():
            expected = dense(dtype)
            part = {key: division.part(expected[key], grid).clone() for key, division in divisions.items()}
            inputs = [part[key].requires_grad_() for key in "xab"]
            kept: dict[int, int] = {}

            def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                kept[tensor.data_ptr()] = max(kept.get(tensor.data_ptr(), 0), tensor.numel())
                return tensor

            grid.received = 0
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                inner = placement.first(inputs[0], inputs[1], grid)
                output = placement.second(F.gelu(inner), inputs[2], grid)
            output.backward(placement.second.outputs.part(expected["grad"], grid).contiguous())

            found = {
                "y": output.detach(),
                **{f"grad of {key}": each.grad for key, each in zip("xab", inputs, strict=True)},
            }
            for key, value in found.items():
                division = divisions[key.removeprefix("grad of ")]
                wanted = division.part(expected[key], grid)
                assert float((value - wanted).abs().max()) < tolerance * float(expected[key].abs().max()), (name, key)
            assert grid.received == volume_of_pair(name, tensor_ranks, TOKENS, HIDDEN, INNER), name
            assert all(part[key].numel() * tensor_ranks == expected[key].numel() for key in "ab")
            # X, A, B, the inner activations before GELU and after it; in 1-D every rank has all of X.
            held = sum(kept.values())
            shared = TOKENS * HIDDEN if name == "1d" else TOKENS * HIDDEN // tensor_ranks
            assert held == shared + (2 * HIDDEN * INNER + 2 * TOKENS * INNER) // tensor_ranks, name
            if name != "1d":
                whole = placement.second.outputs.whole(part["y"], grid)
                assert torch.equal(whole, expected["y"])


@pytest.mark.parametrize(
    ("world", "tensor_ranks", "names"), [(4, 4, ["1d", "2d"]), (8, 8, ["1d", "3d"]), (4, 2, ["1d"])]
)
def test_a_pair_of_products_is_the_dense_one(world: int, tensor_ranks: int, names: list[str]):
    """The last world has two tensor groups, whose members are neighbours."""
    run_distributed(compare_with_dense, world, names, tensor_ranks)


def compare_heads(settings: ModelSettings) -> None:
    """Losses, logits and gradients of a divided table; targets of texts and of two codebooks, and of one of them."""
    dist.init_process_group("gloo")
    rank, world, vocabulary = dist.get_rank(), dist.get_world_size(), settings.vocab_size
    grid = BY_NAME["1d"].grid([list(range(world))], rank, lambda ranks: own_group(ranks, "tensor"))
    generator = torch.Generator().manual_seed(0)
    first, book = settings.first_code_id, settings.codebook_size
    mixed = [3, first + book + 1, vocabulary - 1, first, 0, first - 1]
    for targets in (torch.tensor(mixed), torch.tensor([first + 1]), torch.tensor([1, 2]), torch.tensor([], dtype=int)):
        states = torch.randn(len(targets), settings.hidden_size, dtype=torch.float64, generator=generator)
        table = torch.randn(vocabulary, settings.hidden_size, dtype=torch.float64, generator=generator)
        own = table[rank::world].clone().requires_grad_()
        assert len(own) == DividedHead(grid).rows(settings)
        found, expected = states.clone().requires_grad_(), states.clone().requires_grad_()
        table.requires_grad_()
        for function in ("losses", "logits"):
            for each in (found, expected, own, table):
                each.grad = None
            arguments = (targets, settings) if function == "losses" else (settings,)
            results = [
                getattr(head, function)(inputs, matrix, *arguments)
                for head, inputs, matrix in ((DividedHead(grid), found, own), (Head(), expected, table))
            ]
            weights = torch.randn(results[1].shape, dtype=torch.float64, generator=generator)
            for result in results:
                (result * weights).sum().backward()
            torch.testing.assert_close(*results, rtol=0, atol=1e-12)
            torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-12)
            torch.testing.assert_close(own.grad, table.grad[rank::world], rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_a_divided_head_has_the_losses_of_the_whole_one(world: int):
    """Three ranks have unequal numbers of rows, and of some ranges of the vocabulary."""
    books = {"text_vocab_size": 32, "image_vocab_size": 10, "codes_per_place": 2, "code_grid_size": 4}
    run_distributed(compare_heads, world, ModelSettings(hidden_size=16, num_attention_heads=2, **books))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_reference_is_not_trivial(dtype: torch.dtype):
    expected: dict[str, Any] = dense(dtype)
    assert all(float(expected[key].abs().max()) > 0.1 for key in ("y", "grad of x", "grad of a", "grad of b"))
