"""The router: float32 arithmetic on tokens of which nothing wider is kept."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoELayer
from moe.layer import MoEOutput
from moe.parts import SequenceSlice, SequenceSlices
from moe.routing import Fp32RouterLinear, Router, divide, part_sizes, route

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def make_router(dtype: torch.dtype, jitter: float = 0.0) -> Router:
    torch.manual_seed(0)
    router = Router(16, MoEConfig(num_experts=8, num_prototypes=2, router_jitter=jitter))
    torch.nn.init.normal_(router.weight)
    return router.to(dtype)


def saved(function: Callable[..., Tensor | MoEOutput], *inputs: Tensor) -> dict[int, int]:
    """The bytes of each storage that autograd keeps, by its address."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*inputs)
    assert output is not None
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_logits_and_gradients_equal_those_of_wide_copies(dtype: torch.dtype, jitter: float) -> None:
    router = make_router(dtype, jitter)
    tokens = torch.randn(33, 16).to(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    torch.manual_seed(1)
    logits = router(tokens)
    torch.manual_seed(1)
    noise = torch.empty(33, 16, dtype=wide).uniform_(1 - jitter, 1 + jitter) if jitter else 1
    expected = torch.nn.functional.linear(tokens.to(wide) * noise, router.weight.to(wide)).view(33, 2, 4)
    assert torch.equal(logits, expected)
    direction = torch.randn_like(expected)
    inputs = [tokens, router.weight]
    for own, other in zip(
        torch.autograd.grad(logits, inputs, direction), torch.autograd.grad(expected, inputs, direction), strict=True
    ):
        assert own.dtype == dtype
        assert torch.equal(own, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_and_weight_are_saved_in_their_own_type(dtype: torch.dtype) -> None:
    """And, with jitter, the noise, which is float32: it has more distinct values than 16 bits."""
    tokens = torch.randn(33, 16).to(dtype).requires_grad_()
    for jitter in (0.0, 0.1):
        router = make_router(dtype, jitter)
        kept = saved(router, tokens)
        assert kept.pop(tokens.data_ptr()) == tokens.nbytes
        assert kept.pop(router.weight.data_ptr()) == router.weight.nbytes
        assert sum(kept.values()) == (33 * 16 * max(4, dtype.itemsize) if jitter else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bytes_kept_by_a_layer_in_16_bits(dtype: torch.dtype) -> None:
    """Recomputing the activation, with one expert a token: D + F of the D + 2 F numbers of a dense network, 0.556, and
    some 100 bytes of scores and places a token, 0.02 of its 4,608. A float32 copy of the tokens would add 0.22."""
    layer = MoELayer(256, 1024, MoEConfig(num_experts=8, recompute_activation=True)).to(dtype)
    tokens = torch.randn(128, 256).to(dtype).requires_grad_()
    kept = saved(layer, tokens)
    own = sum(kept.values()) - sum(kept.get(weight.data_ptr(), 0) for weight in layer.parameters())
    dense = 128 * (256 + 2 * 1024) * dtype.itemsize
    assert 0.55 * dense < own <= 0.58 * dense


def test_second_derivatives() -> None:
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (3, 4))]
    noise = torch.rand(5, 4, dtype=torch.float64)
    for each in (noise, None):
        function = lambda x, w, each=each: Fp32RouterLinear.apply(x, w, each, torch.float64)  # noqa: E731
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_autocast_changes_neither_pass() -> None:
    """Not even where the backward pass is called inside of it."""
    grads = []
    for enabled in (False, True):
        router = make_router(torch.float32)
        tokens = torch.linspace(-1, 1, 80).view(5, 16).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            router(tokens).square().sum().backward()
        grads.append([tokens.grad, router.weight.grad])
    for plain, inside in zip(*grads, strict=True):
        assert torch.equal(plain, inside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter_under_checkpointing_and_compilation(dtype: torch.dtype) -> None:
    router = make_router(dtype, jitter=0.1)
    tokens = torch.randn(33, 16).to(dtype).requires_grad_()
    torch._dynamo.reset()
    results = []
    for function in (
        router,
        lambda x: checkpoint(router, x, use_reentrant=False),
        torch.compile(router, backend="aot_eager", fullgraph=True),
    ):
        torch.manual_seed(1)
        logits = function(tokens)
        results.append([logits, *torch.autograd.grad(logits.square().sum(), [tokens, router.weight])])
    for other in results[1:]:
        for own, expected in zip(other, results[0], strict=True):
            assert torch.equal(own, expected)


def test_the_router_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        router = Router(16, MoEConfig(num_experts=8, router_jitter=0.1)).bfloat16()
        tokens = torch.empty(5, 16, dtype=torch.bfloat16, requires_grad=True)
    logits = router(tokens)
    logits.sum().backward()
    assert (logits.shape, logits.dtype) == ((5, 1, 8), torch.float32)
    for grad in (tokens.grad, router.weight.grad):
        assert grad is not None
        assert grad.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_logit_that_is_not_finite_shows_in_the_entropy(value: float) -> None:
    layer = MoELayer(8, 16, MoEConfig(num_experts=4, num_prototypes=2))
    tokens = torch.randn(5, 8)
    assert layer(tokens).stats.router_entropy.isfinite().all()
    tokens[3] = value
    assert layer(tokens).stats.router_entropy.isnan().any()


@pytest.mark.parametrize("gating", ["softmax", "global_softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_scores_too_small_for_float32(gating: str, normalize: bool, biased: bool) -> None:
    """Logits around -90, prototypes 120 apart, and gradients under a loss scale of 2^16, against float64 formulas.

    1e-4: differences of logits near 200 in float32, whose spacing there is 1.5e-5.
    """
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=8, num_prototypes=2, top_k=2, gating=gating, normalize_gates=normalize, z_loss_weight=1e-3
    )
    bias = torch.tensor([9.0, 0.0, 0.0, 5.0, 0.0, 3.0, 0.0, 2.0]) if biased else None
    logits = torch.randn(20, 2, 4) * 4 - 90 + torch.tensor([0.0, -120.0])[:, None]
    logits[0] = 90 * torch.randn(2, 4)
    logits.requires_grad_()
    routing, losses, stats = route(logits, config, True, bias)
    aux_loss = losses.mean
    direction = torch.randn(20, 8, dtype=torch.float64)
    experts = torch.arange(8).repeat_interleave(routing.counts)
    loss = (routing.gates * direction[routing.tokens, experts].float()).sum() + aux_loss
    (grad,) = torch.autograd.grad(2**16 * loss, logits)

    exact = logits.detach().double().requires_grad_()
    exponentials = (exact - (0 if gating == "sigmoid" else exact.amax((1, 2), keepdim=True))).exp()
    scores = {
        "softmax": exponentials / exponentials.sum(-1, keepdim=True),
        "global_softmax": exponentials / exponentials.sum((1, 2), keepdim=True),
        "sigmoid": exponentials / (1 + exponentials),
    }[gating]
    chosen = (scores if bias is None else scores + bias.double().view(2, 4)).topk(2).indices
    kept = torch.zeros_like(scores).scatter(2, chosen, 1.0)
    assert torch.equal(routing.counts, kept.sum(0).flatten().long())
    gates = scores * kept
    gates = gates / gates.sum((1, 2), keepdim=True) if normalize else gates
    torch.testing.assert_close(routing.gates.double(), gates.flatten(1)[routing.tokens, experts], rtol=1e-4, atol=1e-7)
    shares = kept.sum(0) / kept.sum((0, 2))[:, None]
    probabilities = scores / scores.sum(-1, keepdim=True)
    balance = 4 * (shares * probabilities.mean(0)).sum() / 2
    z_loss = exact.logsumexp(-1).square().mean()
    expected = config.aux_loss_weight * balance + config.z_loss_weight * z_loss
    torch.testing.assert_close(aux_loss.double(), expected, rtol=1e-5, atol=0)
    expected_loss = (gates.flatten(1) * direction).sum() + expected
    (expected_grad,) = torch.autograd.grad(2**16 * expected_loss, exact)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-4 * expected_grad.abs().max().item())
    entropy = -(probabilities * probabilities.log()).sum(-1).mean(0)
    torch.testing.assert_close(stats.router_entropy.double(), entropy, rtol=1e-4, atol=1e-5)


def test_a_saturated_sigmoid_does_not_tie() -> None:
    """1 - sigmoid(20) is below the spacing of float32, but the larger logit is still the choice."""
    logits = torch.tensor([[[20.0, 30.0, 25.0, -200.0]], [[-150.0, -140.0, -120.0, -130.0]]])
    routing, *_ = route(logits, MoEConfig(num_experts=4, top_k=2, gating="sigmoid"), True)
    experts = torch.arange(4).repeat_interleave(routing.counts)
    assert sorted(zip(routing.tokens.tolist(), experts.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2), (1, 3)]


@pytest.mark.parametrize("rounding", ["up", "random"])
@pytest.mark.parametrize(("order", "top_k", "rows"), [("causal", 2, 3), ("position", 1, 1)])
def test_parts_of_rows_drop_the_pairs_of_whole_rows(order: str, top_k: int, rows: int, rounding: str) -> None:
    """An even part, an empty one and a part of one place. A call may be repeated, as by activation checkpointing."""
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=8, num_prototypes=2, top_k=top_k, capacity_factor=0.6, min_capacity=1,
        drop_order=order, capacity_rounding=rounding,
    )  # fmt: skip
    logits, length, cuts = torch.randn(rows, 12, 2, 4), 12, [0, 6, 6, 7, 12]

    def pairs(begin: int, end: int, part: SequenceSlice | None = None) -> set[tuple[int, ...]]:
        """The place, row and expert of each computed pair."""
        places = torch.arange(end - begin).repeat(rows)
        torch.manual_seed(begin)  # of the rounding
        routing, *_ = route(logits[:, begin:end].reshape(-1, 2, 4), config, True, part=part, places=places)
        row = torch.arange(rows).repeat_interleave(end - begin)[routing.tokens]
        experts = torch.arange(8).repeat_interleave(routing.counts)
        return set(zip((begin + places[routing.tokens]).tolist(), row.tolist(), experts.tolist(), strict=True))

    whole = SequenceSlices(rows * length)
    slices = [(begin, end, SequenceSlice(whole, number)) for number, (begin, end) in enumerate(pairwise(cuts))]
    parts = [pairs(*each) for each in slices]
    assert parts == [pairs(*each) for each in slices]
    everything = pairs(0, length)
    assert set().union(*parts) == everything
    assert 0 < len(everything) < rows * length * 2 * top_k


@pytest.mark.parametrize("capacity_factor", [None, 0.6])
@pytest.mark.parametrize(("num_tokens", "num_parts"), [(11, 2), (12, 5), (2, 3), (0, 2)])
def test_divided_pairs_are_those_of_each_part(num_tokens: int, num_parts: int, capacity_factor: float | None) -> None:
    torch.manual_seed(0)
    config = MoEConfig(num_experts=8, num_prototypes=2, top_k=2, capacity_factor=capacity_factor, min_capacity=1)
    routing, *_ = route(torch.randn(num_tokens, 2, 4), config, True)
    sizes = part_sizes(num_tokens, num_parts)
    assert sum(sizes) == num_tokens
    assert max(sizes) - min(sizes) <= 1
    experts = torch.arange(8).repeat_interleave(routing.counts)
    everything = list(zip(experts.tolist(), routing.tokens.tolist(), routing.gates.tolist(), strict=True))
    first = 0
    parts = divide(routing, num_tokens, num_parts)
    assert len(parts) == num_parts
    for part, size in zip(parts, sizes, strict=True):
        own = torch.arange(8).repeat_interleave(part.counts)
        found = zip(own.tolist(), (part.tokens + first).tolist(), part.gates.tolist(), strict=True)
        assert list(found) == [each for each in everything if first <= each[1] < first + size]
        first += size
