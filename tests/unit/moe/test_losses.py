"""The balancing loss over the tokens of all ranks, and over those of several calls of a layer."""

from typing import Literal

import pytest
import torch

from moe import MoEConfig, TokenPart, TokenParts
from moe.losses import load_balancing_loss
from moe.routing import route
from tests.distributed.spawn import run_distributed


def global_loss(parts: list[torch.Tensor], counts: list[torch.Tensor], expected: torch.Tensor, grad: torch.Tensor):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    probabilities = parts[rank].requires_grad_()
    loss = load_balancing_loss(probabilities, counts[rank], "global_batch")
    (own,) = torch.autograd.grad(loss, probabilities)
    begin = sum(len(part) for part in parts[:rank])
    # The mean over ranks is the loss of the whole batch: what averaging the gradients over ranks gives.
    torch.testing.assert_close(own / len(parts), grad[begin : begin + len(own)], rtol=1e-12, atol=1e-12)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    torch.testing.assert_close(total / len(parts), expected, rtol=1e-12, atol=1e-12)


def test_global_batch_loss_equals_that_of_one_rank_with_all_tokens() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(size, 2, 4, dtype=torch.float64).softmax(-1) for size in (7, 12)]
    counts = [torch.stack([part[:, z].argmax(-1).bincount(minlength=4) for z in range(2)]) for part in parts]
    everything = torch.cat(parts).requires_grad_()
    expected = load_balancing_loss(everything, sum(counts))
    (grad,) = torch.autograd.grad(expected, everything)
    run_distributed(global_loss, 2, parts, counts, expected.detach(), grad)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_parts_of_tokens_have_the_losses_of_all(gating: Literal["softmax", "sigmoid"]) -> None:
    """Values add up, and gradients are equal, whatever the parts; one of them is empty, and a call may be repeated."""
    torch.manual_seed(0)
    config = MoEConfig(num_experts=8, num_prototypes=2, top_k=2, gating=gating, aux_loss_weight=0.5, z_loss_weight=0.1)
    logits = torch.randn(20, 2, 4, dtype=torch.float64, requires_grad=True)
    _, expected, _ = route(logits, config, training=True)
    (gradient,) = torch.autograd.grad(expected, logits)
    whole = TokenParts(20)
    parts = logits.split([3, 0, 10, 7])
    losses = [route(part, config, True, None, TokenPart(whole, number))[1] for number, part in enumerate(parts)]
    torch.testing.assert_close(sum(losses), expected, rtol=1e-12, atol=1e-12)
    route(parts[2], config, True, None, TokenPart(whole, 2))
    (found,) = torch.autograd.grad(losses[::-1], logits)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
