"""The experts' operator: equal by every way of computing it, without waiting for the device, in bounded memory."""

import pytest
import torch
from torch import library
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe import MoEConfig, MoELayer
from moe.kernels import experts_op as experts_op_module
from moe.kernels import products
from moe.kernels.experts_op import ExpertsFunction, Pairs, experts_backward_op, experts_op
from moe.kernels.products import choose_products
from moe.routing import Router, route


def make_layer(dtype=torch.float32, sizes=(16, 32), **changes) -> MoELayer:
    config = MoEConfig(**{"num_experts": 6, "num_prototypes": 2, "top_k": 2, **changes})
    torch.manual_seed(0)
    layer = MoELayer(*sizes, config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer.to(dtype)


def run(layer: MoELayer, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, the gradient of the input and those of the parameters."""
    x = x.detach().requires_grad_()
    output = layer(x)
    loss = (output.hidden_states.float() * torch.linspace(-1, 1, x.shape[-1])).sum() + output.aux_loss
    return [output.hidden_states.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_16_bit_products_computed_in_float32(monkeypatch: pytest.MonkeyPatch, dtype, activation: str) -> None:
    """2 % of the largest value: a few roundings to 8 bits (bfloat16), most by chance in opposite directions."""
    monkeypatch.setattr(products, "_is_emulated", lambda rows: rows.dtype == dtype)
    layer = make_layer(dtype, activation=activation, bias=True)
    x = torch.randn(40, 16).to(dtype)
    own = run(layer, x)
    for result, exact in zip(own, run(layer.double(), x.double()), strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=0, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_of_hidden_units(activation: str, recompute: bool) -> None:
    """Against plain autograd with the same mask, in float64."""
    layer = make_layer(torch.float64, activation=activation, bias=True, top_k=1, recompute_activation=recompute)
    x = torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    routing, *_ = route(layer.router(x), layer.config, True)
    gates = routing.gates.detach().requires_grad_()
    mask = torch.rand(len(gates), 32) < 0.7
    experts = layer.experts
    weights = [experts.w_in, experts.w_out, experts.b_in, experts.b_out]
    pairs = (routing.tokens, gates, *routing.by_token)
    output = ExpertsFunction.apply(x, *pairs, routing.counts, *weights, mask, 0.3, activation, recompute, True)

    ids = torch.arange(6).repeat_interleave(routing.counts)
    hidden = torch.einsum("rd,rfd->rf", x[routing.tokens], experts.w_in[ids]) + experts.b_in[ids]
    if activation == "swiglu":
        gate, value = hidden.chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * value
    else:
        hidden = getattr(torch.nn.functional, activation)(hidden)
    rows = torch.einsum("rf,rdf->rd", hidden * mask / 0.7, experts.w_out[ids]) + experts.b_out[ids]
    expected = torch.zeros_like(x).index_add(0, routing.tokens, rows * gates[:, None])
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    inputs = [x, gates, *weights]
    direction = torch.randn_like(x)
    for own, other in zip(
        torch.autograd.grad((output * direction).sum(), inputs),
        torch.autograd.grad((expected * direction).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weigh", [False, True])
def test_the_error_of_a_sum_by_token_does_not_grow(dtype: torch.dtype, weigh: bool) -> None:
    """Half a spacing of the type: 512 numbers near 1 are added in float32, and the sum is rounded."""
    torch.manual_seed(0)
    rows, gates = torch.rand(1024, 8).add(0.5).to(dtype), torch.rand(1024).add(0.5)
    pairs = Pairs(
        torch.arange(2).repeat(512), gates, torch.arange(1024).view(512, 2).T.reshape(-1), torch.arange(2) * 512
    )
    expected = (rows.double() * (gates.double()[:, None] if weigh else 1)).view(512, 2, 8).sum(0)
    output = experts_op_module.sum_by_token(rows, pairs, weigh)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_gates_of_16_bit_layers_have_float32_gradients(recompute: bool) -> None:
    """<g, y> of 2,048 products of bfloat16 numbers: half a spacing of bfloat16 for y, and no more for the sum.

    The numbers are powers of two or sums of few, so that y is exact and the tolerance is that of a sum in float32.
    """
    config = MoEConfig(num_experts=1, activation="relu", bias=True, recompute_activation=recompute)
    layer = MoELayer(2048, 1, config, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.experts.w_in.zero_().view(-1)[0] = 1.0
        layer.experts.w_out.fill_(1.0)
        layer.experts.b_in.zero_()
        layer.experts.b_out.fill_(0.25)
    x = torch.ones(2, 2048, dtype=torch.bfloat16)
    gates = torch.ones(2, requires_grad=True)
    pairs = Pairs(torch.arange(2), gates, torch.arange(2), torch.arange(2))
    output = layer.experts(x, torch.tensor([2]), pairs)
    (grad,) = torch.autograd.grad(output, gates, torch.full_like(x, 1.25))
    assert grad.dtype == torch.float32
    assert grad.tolist() == [2048 * 1.25 * 1.25] * 2


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rate", [0.2, 0.75])
def test_the_rate_of_dropout(rate: float, shared: bool) -> None:
    """Of 128,000 hidden units of value 1: their share is within 6 standard deviations, and their mean stays 1."""
    config = MoEConfig(num_experts=2, num_shared_experts=1, activation="relu", expert_dropout=rate)
    layer = MoELayer(64, 64, config)
    with torch.no_grad():
        for weight in (layer.experts.w_in, layer.experts.w_out, layer.shared.w_in, layer.shared.w_out):
            weight.copy_(torch.eye(64))
    torch.manual_seed(0)
    compute = layer.shared if shared else lambda x: layer.experts(x, torch.tensor([1500, 500]))
    x = torch.ones(2000, 64)
    units = compute(x)
    zero = (units == 0).float().mean().item()
    assert zero == pytest.approx(rate, abs=6 * (rate * (1 - rate) / 128_000) ** 0.5)
    torch.testing.assert_close(units[units != 0], torch.full_like(units[units != 0], 1 / (1 - rate)))
    layer.eval()
    assert torch.equal(compute(x), x)


class Seen(TorchDispatchMode):
    """The names of the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_without_gradients_no_operator_is_dispatched(activation: str) -> None:
    layer, x = make_layer(activation=activation).eval(), torch.randn(9, 16)
    with Seen() as seen:
        expected = layer(x).hidden_states
    assert "moe.experts.default" in seen.names
    with Seen() as seen, torch.no_grad():
        output = layer(x).hidden_states
    assert "moe.experts.default" not in seen.names
    assert torch.equal(output, expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert layer(mode.from_tensor(x)).hidden_states.shape == x.shape


def test_dropout_and_jitter_only_in_training() -> None:
    layer = make_layer(expert_dropout=0.5, router_jitter=0.1)
    x = torch.randn(50, 16)
    torch.manual_seed(1)
    first = layer(x).hidden_states
    torch.manual_seed(1)
    assert torch.equal(layer(x).hidden_states, first)
    assert not torch.equal(layer(x).hidden_states, first)
    layer.eval()
    assert torch.equal(layer(x).hidden_states, layer(x).hidden_states)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_results_are_deterministic(recompute: bool, capacity_factor: float | None) -> None:
    layer = make_layer(recompute_activation=recompute, capacity_factor=capacity_factor)
    x = torch.randn(200, 16)
    for first, second in zip(run(layer, x), run(layer, x), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    "changes", [{}, {"recompute_activation": True}, {"bias": True, "activation": "swiglu"}], ids=str
)
def test_operators_follow_pytorchs_rules(changes: dict) -> None:
    """Their schemas, and fake kernels whose shapes and types equal the real ones."""
    layer = make_layer(**changes)
    x = torch.randn(9, 16)
    with torch.no_grad():
        routing, *_ = route(layer.router(x), layer.config, True)
        experts = layer.experts
        weights = [None if each is None else each.detach() for each in (experts.w_in, experts.w_out, experts.b_in)]
        weights.append(None if experts.b_out is None else experts.b_out.detach())
        settings = (None, 0.0, layer.config.activation, layer.config.recompute_activation)
        pairs = (routing.tokens, routing.gates, *routing.by_token)
        for rows, own in ((x, pairs), (x[routing.tokens], (None,) * 4)):
            arguments = (rows, *own, routing.counts, *weights, *settings)
            output, *kept = experts_op(*arguments, True)
            library.opcheck(experts_op, (*arguments, True))
            needed = [each is not None for each in (rows, own[1], *weights)]
            for each in (needed, [False] * 6):
                library.opcheck(experts_backward_op, (torch.randn_like(output), *kept, *arguments, each))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"recompute_activation": True, "gating": "sigmoid"}], ids=str)
def test_compiles_into_one_graph(dtype: torch.dtype, changes: dict) -> None:
    """The eager backend traces forward and backward as inductor would; bfloat16 rounds at other places."""
    layer = make_layer(dtype, **changes)
    x = torch.randn(32, 16, dtype=dtype)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for own, eager in zip(run(compiled, x), run(layer, x), strict=True):
        torch.testing.assert_close(own, eager, rtol=tolerance, atol=tolerance * eager.abs().max().item())


def test_dropless_path_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors whatever would read a value on the host raises, inside of the operator too.

    The grouped products, which every device but a CPU gets.
    """
    monkeypatch.setattr(experts_op_module, "choose_products", lambda rows, counts, *_: products.GroupedProducts(counts))
    config = MoEConfig(num_experts=6, num_prototypes=2, bias=True)
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(32, 16, dtype=torch.bfloat16)
        router = Router(16, config)
        weights = [torch.empty(6, *shape, dtype=torch.bfloat16) for shape in ((32, 16), (16, 32), (32,), (16,))]
        routing, *_ = route(router(x), config, True)
        pairs = (routing.tokens, routing.gates, *routing.by_token)
        settings = (None, 0.0, "gelu", True)
        output, h, a, y = experts_op._init_fn(x, *pairs, routing.counts, *weights, *settings, True)
        assert (output.shape, h.shape) == ((32, 16), (64, 32))
        arguments = (output, h, a, y, x, *pairs, routing.counts, *weights, *settings)
        grads = experts_backward_op._init_fn(*arguments, [True] * 6)
        assert [grad.shape for grad in grads[2:]] == [weight.shape for weight in weights]
        with pytest.raises(DataDependentOutputException):  # the check checks
            routing.counts.tolist()


class Counted:
    """Products that write down which of their methods are called."""

    def __init__(self, products: products.Products, calls: list[str]) -> None:
        self._products, self._calls = products, calls

    def __getattr__(self, name: str) -> object:
        self._calls.append(name)
        return getattr(self._products, name)


@pytest.mark.parametrize("recompute", [False, True])
def test_only_gradients_that_are_needed_are_computed(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    """Whatever is frozen, the other gradients stay the same to the bit."""
    layer = make_layer(bias=True, recompute_activation=recompute, expert_dropout=0.2)
    x, calls = torch.randn(40, 16), []
    monkeypatch.setattr(experts_op_module, "choose_products", lambda *args: Counted(choose_products(*args), calls))
    inputs = {"x": x, **dict(layer.named_parameters())}
    expected_calls = {
        "x": ["input_grad"],
        "experts.w_in": ["weight_grad"],
        "experts.w_out": ["weight_grad"],
        "experts.b_in": ["bias_grad"],
        "experts.b_out": ["bias_grad"],
        "router.weight": [],
    }

    def gradients(needed: list[str]) -> tuple[torch.Tensor, ...]:
        for name, each in inputs.items():
            each.requires_grad_(name in needed)
        torch.manual_seed(0)
        output = layer(x).hidden_states
        calls.clear()
        return torch.autograd.grad(output.sin().sum(), [inputs[name] for name in needed])

    all_of_them = dict(zip(inputs, gradients(list(inputs)), strict=True))
    subsets = [[name] for name in inputs] + [[other for other in inputs if other != name] for name in inputs]
    for needed in subsets:
        for name, grad in zip(needed, gradients(needed), strict=True):
            assert torch.equal(grad, all_of_them[name]), (needed, name)
        expected = [call for name in needed for call in expected_calls[name]]
        # The gradient of the hidden units is the way to those before them, and with recomputation to the gates.
        if {"x", "experts.w_in", "experts.b_in"} & {*needed} or (recompute and {"x", "router.weight"} & {*needed}):
            expected.append("input_grad")
        assert sorted(calls) == sorted(expected), needed


def test_meta_device() -> None:
    with torch.device("meta"):
        layer = MoELayer(16, 32, MoEConfig(num_experts=6, num_prototypes=2))
        output = layer(torch.empty(2, 5, 16, requires_grad=True))
    (output.hidden_states.sum() + output.aux_loss).backward()
    assert output.hidden_states.shape == (2, 5, 16)
    assert layer.experts.w_in.grad.device.type == "meta"


def saved_bytes(function, *inputs: torch.Tensor, weights: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages that autograd keeps, weights excepted."""
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function(*inputs)
    assert kept is not None
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("changes", "bound"), [({"top_k": 2}, 0.55), ({"num_prototypes": 4}, 0.55), ({}, 0.60)], ids=str
)
def test_bytes_kept_with_recomputation(changes: dict, bound: float) -> None:
    """Against a dense network with the same products: inputs, inner values, activations of as many rows.

    One expert a token keeps D + F of D + 2 F numbers, 0.556; more experts share the token.
    """
    config = MoEConfig(**{"num_experts": 8, "recompute_activation": True, "num_prototypes": 1, "top_k": 1} | changes)
    layer = MoELayer(64, 256, config)
    x = torch.randn(512, 64, requires_grad=True)
    own = saved_bytes(lambda x: layer(x), x, weights=list(layer.parameters()))
    dense = torch.nn.Sequential(
        torch.nn.Linear(64, 256, bias=False), torch.nn.GELU(), torch.nn.Linear(256, 64, bias=False)
    )
    rows = torch.randn(512 * config.experts_per_token, 64, requires_grad=True)
    assert own <= bound * saved_bytes(dense, rows, weights=list(dense.parameters()))


def test_autocast_keeps_no_copies_of_weights() -> None:
    """Four uses of a layer in autocast keep what they keep in bfloat16, and float32 tokens in bfloat16 as well."""
    x = torch.randn(64, 16, requires_grad=True)
    kept = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = make_layer(dtype, sizes=(16, 512))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            rows = x.to(dtype)
            kept.append(
                saved_bytes(lambda x, layer=layer: [layer(x) for _ in range(4)], rows, weights=list(layer.parameters()))
            )
    tokens = x.nbytes + 4 * x.nbytes // 2  # for the router in float32, and for the experts of each use
    assert kept[0] <= kept[1] + tokens
    assert tokens < layer.experts.w_in.nbytes
