"""Balancing biases: one step, convergence, precision, and what counts."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe import BiasBalancer, MoEConfig, MoELayer


def skewed_layer(rate: float = 0.02, **changes) -> tuple[MoELayer, torch.Tensor]:
    torch.manual_seed(0)
    layer = MoELayer(8, 16, MoEConfig(num_experts=8, num_prototypes=2, balance_bias_rate=rate, **changes))
    with torch.no_grad():
        layer.router.weight.normal_(std=0.5)
        layer.router.weight[:, 0] += torch.linspace(0, 2, 8)
    return layer, torch.randn(256, 8).index_fill(1, torch.tensor([0]), 1.0)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_biases_balance_the_load(gating: str) -> None:
    layer, x = skewed_layer(rate=0.01, gating=gating)
    balancer = BiasBalancer([layer])

    def imbalance() -> float:
        return layer(x).stats.expert_counts.view(2, 4).std(-1).max().item()

    before = imbalance()
    for _ in range(120):
        balancer.add([layer(x).stats])
        balancer.step()
    assert imbalance() < 0.2 * before


def test_one_step_of_the_biases() -> None:
    layer, x = skewed_layer(rate=0.5)
    stats = layer(x).stats
    again = stats._replace(chosen_counts=torch.tensor([9.0, 1, 1, 1, 2, 2, 2, 2]))
    balancer = BiasBalancer([layer, layer])  # shared by two places of the model: counted together
    balancer.add([again, again._replace(chosen_counts=torch.tensor([0.0, 4, 4, 4, 0, 0, 0, 0]))])
    balancer.step()
    assert layer.router.balance_bias.tolist() == [-0.5, 0.5, 0.5, 0.5, 0, 0, 0, 0]  # loads 9 5 5 5, mean 6
    balancer.step()  # nothing was counted
    assert layer.router.balance_bias[0] == -0.5
    balancer.add([again, again])
    balancer.discard()
    balancer.step()
    assert layer.router.balance_bias[0] == -0.5


def test_prototypes_whose_experts_lie_in_two_groups() -> None:
    layer, x = skewed_layer(rate=0.5, num_groups=2)
    balancer = BiasBalancer([layer])
    # The first prototype has the experts 0, 1, 4 and 5 with a mean of 3, the second one the others with 6.
    balancer.add([layer(x).stats._replace(chosen_counts=torch.tensor([9.0, 1, 6, 6, 1, 1, 5, 7]))])
    balancer.step()
    assert layer.router.balance_bias.tolist() == [-0.5, 0.5, 0, 0, 0.5, 0.5, 0.5, -0.5]


def test_layers_of_different_sizes() -> None:
    layers = [MoELayer(8, 16, MoEConfig(num_experts=size, balance_bias_rate=0.5)) for size in (2, 4)]
    balancer = BiasBalancer(layers)
    stats = [layer(torch.randn(6, 8)).stats for layer in layers]
    counts = (torch.tensor([1.0, 5.0]), torch.tensor([0.0, 0.0, 6.0, 2.0]))
    balancer.add([each._replace(chosen_counts=own) for each, own in zip(stats, counts, strict=True)])
    balancer.step()
    assert layers[0].router.balance_bias.tolist() == [0.5, -0.5]
    assert layers[1].router.balance_bias.tolist() == [0.5, 0.5, -0.5, 0]


def test_the_bias_changes_the_choice_but_not_the_gate() -> None:
    layer, x = skewed_layer()
    layer.router.balance_bias.copy_(torch.tensor([10.0, 0, 0, 0, 10.0, 0, 0, 0]))
    output = layer(x)
    assert output.stats.expert_counts.tolist() == [256, 0, 0, 0, 256, 0, 0, 0]
    gates = layer.router(x).softmax(-1)[:, :, 0]
    hidden = torch.nn.functional.gelu(torch.einsum("td,zfd->tzf", x, layer.experts.w_in[[0, 4]]))
    rows = torch.einsum("tzf,zdf->tzd", hidden, layer.experts.w_out[[0, 4]])
    torch.testing.assert_close(output.hidden_states, (gates[..., None] * rows).sum(1), rtol=1e-4, atol=1e-6)


def test_biases_stay_float32() -> None:
    """A step of 0.001 is lost in a bfloat16 number near 1."""
    layer, x = skewed_layer(rate=0.001)
    layer.router.balance_bias.fill_(1.0)
    layer.bfloat16()
    balancer = BiasBalancer([layer])
    balancer.add([layer(x.bfloat16()).stats])
    balancer.step()
    bias = layer.router.balance_bias
    assert bias.dtype == torch.float32
    assert set((bias - 1).abs().mul(1000).round().tolist()) <= {0.0, 1.0}
    assert (bias != 1).any()
    assert layer.half().router.balance_bias is not None
    assert torch.equal(layer.router.balance_bias, bias)


def test_activation_checkpointing_counts_once() -> None:
    layer, x = skewed_layer()
    x.requires_grad_()
    output = checkpoint(layer, x, use_reentrant=False)
    balancer = BiasBalancer([layer])
    balancer.add([output.stats])
    output.hidden_states.sum().backward()
    assert balancer._counts.sum() == 2 * len(x)
