"""The router: float32 arithmetic on tokens of which nothing wider is kept."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoELayer
from moe.layer import MoEOutput
from moe.routing import Router, WideLinear

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
        function = lambda x, w, each=each: WideLinear.apply(x, w, each, torch.float64)  # noqa: E731
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
