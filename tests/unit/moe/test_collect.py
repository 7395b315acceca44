"""Losses of layers deep inside of a model that passes on only their hidden states."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoELayer, collect_outputs


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layer = MoELayer(8, 12, MoEConfig(num_experts=4, aux_loss_weight=1.0, z_loss_weight=1.0))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x))[0]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_outputs_are_those_of_the_calls(checkpointed: bool) -> None:
    torch.manual_seed(0)
    block = Block(checkpointed)
    model = nn.Sequential(block, nn.Sequential(Block(checkpointed), nn.Tanh()), block)  # one is used twice
    x = torch.randn(6, 8)
    with collect_outputs(model) as outputs:
        y = model(x)
    (y.sum() + sum(output.aux_loss for output in outputs)).backward()

    other = model[1][0]
    hidden, expected = x, []
    for layer in (block.layer, other.layer, block.layer):
        expected.append(layer(hidden))
        hidden = hidden + expected[-1].hidden_states
        hidden = hidden.tanh() if layer is other.layer else hidden
    assert len(outputs) == 3
    for own, each in zip(outputs, expected, strict=True):
        assert torch.equal(own.aux_loss, each.aux_loss)
        assert torch.equal(own.stats.expert_counts, each.stats.expert_counts)
    loss = hidden.sum() + sum(each.aux_loss for each in expected)
    for parameter, grad in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        torch.testing.assert_close(parameter.grad, grad)  # the two uses' gradients are added in either order


def test_nothing_is_left_behind() -> None:
    layer = MoELayer(8, 12, MoEConfig(num_experts=4))
    with pytest.raises(ValueError, match="expected 8 columns"), collect_outputs(layer) as outputs:
        layer(torch.randn(3, 7))
    layer(torch.randn(3, 8))
    assert outputs == []
    assert not layer._forward_hooks
