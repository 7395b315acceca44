"""The layer under torch.compile and on tensors without values, where sizes depend on values."""

import shutil

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from moe import MoEConfig, MoELayer

CAPACITY = {"capacity_factor": 0.7, "min_capacity": 1}


def make_layer(**changes: object) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(16, 32, MoEConfig(**{"num_experts": 6, "num_prototypes": 2, **changes}))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def run(layer: torch.nn.Module, x: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Output, statistics and gradients."""
    x = x.detach().requires_grad_()
    output = layer(x, mask)
    grads = torch.autograd.grad(output.hidden_states.square().sum() + output.aux_loss, [x, *layer.parameters()])
    return [output.hidden_states.detach(), *output.stats, *grads]


def check(layer: MoELayer, backend: str, masked: bool) -> None:
    """One graph for several numbers of tokens, none included; 1e-5 of the largest: sums in another order."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for share in (0.7, 0.3, 0.0) if masked else (1.0,):
        x, mask = torch.randn(32, 16), torch.rand(32) < share if masked else None
        for own, eager in zip(run(compiled, x, mask), run(layer, x, mask), strict=True):
            torch.testing.assert_close(own, eager, rtol=1e-5, atol=1e-5 * max(1.0, eager.abs().max().item()))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("changes", "masked"),
    [
        ({"z_loss_weight": 0.1}, True),
        ({"gating": "sigmoid", "normalize_gates": True, "top_k": 2, "balance_bias_rate": 0.1}, True),
        ({"gating": "global_softmax", "normalize_gates": True}, True),
        (CAPACITY | {"z_loss_weight": 0.1, "min_capacity": 0}, False),
        (CAPACITY | {"recompute_activation": True, "drop_order": "probability"}, True),
        (CAPACITY | {"min_capacity": 0, "num_shared_experts": 1, "bias": True, "activation": "swiglu"}, True),
    ],
)
def test_compiles_into_one_graph(changes: dict, masked: bool) -> None:
    check(make_layer(**changes), "aot_eager", masked)


@pytest.mark.slow
@pytest.mark.nightly  # half a minute of g++ for a graph like those above
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPUs")
def test_inductor() -> None:
    check(make_layer(**CAPACITY), "inductor", masked=True)


@pytest.mark.parametrize(("changes", "masked"), [({}, True), (CAPACITY, False)])
def test_tensors_without_values_need_sizes_that_are_known(changes: dict, masked: bool) -> None:
    def call(device: str) -> Tensor:
        with torch.device(device):
            layer = MoELayer(16, 32, MoEConfig(num_experts=6, num_prototypes=2, **changes))
            mask = torch.empty(8, dtype=torch.bool) if masked else None
            return layer(torch.empty(8, 16), mask).hidden_states

    with pytest.raises(NotImplementedError, match=r"nonzero|meta tensor"):
        call("meta")
    with FakeTensorMode(), pytest.raises((DynamicOutputShapeException, DataDependentOutputException)):
        call("cpu")
