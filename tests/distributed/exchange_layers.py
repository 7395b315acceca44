"""Expert layers, whole and split over ranks, and how equal their results have to be."""

import copy

import torch
from torch import Tensor, nn

from moe import MoEConfig, MoELayer, apply_expert_parallelism

HIDDEN, FFN = 16, 32


def config(**settings: object) -> MoEConfig:
    return MoEConfig(**({"num_experts": 8, "num_prototypes": 4, "aux_loss_weight": 0.0} | settings))


def make_layer(config: MoEConfig) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(HIDDEN, FFN, config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
    return layer


def split(layer: MoELayer, ep_size: int, equal_tokens: bool = False) -> MoELayer:
    model = nn.ModuleList([copy.deepcopy(layer)])
    apply_expert_parallelism(model, ep_size, equal_tokens)
    return model[0]


def assert_equal(found: Tensor, expected: Tensor, where: str = "") -> None:
    """To 1e-6 of the largest number, or of 1, in float32: ranks add up in another order."""
    assert found.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * scale, msg=lambda text: f"{where}: {text}")
