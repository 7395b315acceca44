"""The auxiliary losses of the tokens of all ranks, of several calls of a layer, and of sequences."""

from typing import Literal

import pytest
import torch

from moe import MoEConfig, MoELayer, SequenceSlice, SequenceSlices
from moe.losses import Sequences, load_balancing_losses
from moe.routing import route
from tests.distributed.spawn import run_distributed
from tests.fixtures.moe_reference import reference_moe


def global_loss(parts: list[torch.Tensor], counts: list[torch.Tensor], expected: torch.Tensor, grad: torch.Tensor):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    probabilities = parts[rank].requires_grad_()
    # The mean of a rank weighs as much as its share of the tokens: together they are the loss of the whole batch.
    loss = load_balancing_losses(probabilities, counts[rank], "global_batch").mean() * len(parts[rank]) / len(grad)
    (own,) = torch.autograd.grad(loss, probabilities)
    begin = sum(len(part) for part in parts[:rank])
    torch.testing.assert_close(own, grad[begin : begin + len(own)], rtol=1e-12, atol=1e-12)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_global_batch_loss_equals_that_of_one_rank_with_all_tokens() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(size, 2, 4, dtype=torch.float64).softmax(-1) for size in (7, 12)]
    counts = [torch.stack([part[:, z].argmax(-1).bincount(minlength=4) for z in range(2)]) for part in parts]
    everything = torch.cat(parts).requires_grad_()
    expected = load_balancing_losses(everything, sum(counts)).mean()
    (grad,) = torch.autograd.grad(expected, everything)
    run_distributed(global_loss, 2, parts, counts, expected.detach(), grad)


@pytest.mark.parametrize("scope", ["micro_batch", "global_batch", "sequence"])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_parts_of_tokens_have_the_losses_of_all(
    gating: Literal["softmax", "sigmoid"], scope: Literal["micro_batch", "global_batch", "sequence"]
) -> None:
    """Values add up, and gradients are equal, whatever the parts; one of them is empty, and a call may be repeated."""
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=8,
        num_prototypes=2,
        top_k=2,
        gating=gating,
        aux_loss_weight=0.5,
        z_loss_weight=0.1,
        balance_scope=scope,
    )
    logits = torch.randn(20, 2, 4, dtype=torch.float64, requires_grad=True)
    sizes, numbers = [3, 0, 10, 7], torch.randint(3, (20,))

    def sequences(numbers: torch.Tensor) -> Sequences | None:
        return Sequences(numbers, 3) if scope == "sequence" else None

    expected = route(logits, config, True, sequences=sequences(numbers))[1].mean
    (gradient,) = torch.autograd.grad(expected, logits)
    whole = SequenceSlices(20, 3)
    parts = [(part, sequences(own)) for part, own in zip(logits.split(sizes), numbers.split(sizes), strict=True)]

    def loss(number: int) -> torch.Tensor:
        return route(parts[number][0], config, True, None, SequenceSlice(whole, number, number == 3), parts[number][1])[
            1
        ].mean

    losses = [loss(number) for number in range(4)]
    torch.testing.assert_close(sum(losses), expected, rtol=1e-12, atol=1e-12)
    loss(2)
    (found,) = torch.autograd.grad(losses[::-1], logits)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", ["integers", "bool", "none"])
def test_each_sequence_is_balanced_by_itself(mask: str) -> None:
    """Whatever the calls: weighted by their shares of the tokens they are the losses of sequences alone, in float64."""
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=8, num_prototypes=2, top_k=2, aux_loss_weight=0.5, z_loss_weight=0.1, balance_scope="sequence"
    )
    layer = MoELayer(6, 5, config).double()
    x = torch.randn(4, 9, 6, dtype=torch.float64)
    numbers = torch.randint(4, (4, 9)) if mask == "integers" else torch.ones(4, 9, dtype=torch.int64)
    if mask == "bool":
        numbers = torch.tensor([9, 1, 4, 6])[:, None] > torch.arange(9)
    total = int((numbers != 0).sum())
    parameters = dict(layer.named_parameters())
    expected = torch.zeros((), dtype=torch.float64)
    for row, own in zip(x, numbers, strict=True):
        for number in set(own[own != 0].tolist()):
            tokens = row[own == number]
            alone = reference_moe(tokens, torch.ones(len(tokens), dtype=torch.bool), parameters, config)
            expected = expected + alone.aux_loss * len(tokens) / total
    (gradient,) = torch.autograd.grad(expected, layer.router.weight)
    for sizes in ([4], [1, 3], [1, 1, 1, 1]):
        loss = torch.zeros((), dtype=torch.float64)
        for rows, own in zip(x.split(sizes), numbers.split(sizes), strict=True):
            output = layer(rows, None if mask == "none" else own)
            assert output.aux_losses.shape == own.shape
            assert not output.aux_losses[own == 0].any()
            num_tokens = (own != 0).sum()
            torch.testing.assert_close(output.aux_losses.sum() / num_tokens, output.aux_loss, rtol=1e-12, atol=1e-12)
            loss = loss + output.aux_loss * num_tokens / total
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        (found,) = torch.autograd.grad(loss, layer.router.weight)
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-9)


def test_no_token_of_a_sequence() -> None:
    layer = MoELayer(6, 5, MoEConfig(num_experts=4, balance_scope="sequence"))
    assert layer(torch.randn(2, 3, 6), torch.zeros(2, 3, dtype=torch.int64)).aux_loss == 0
