"""Encoder and decoder of the VQ autoencoder. Shapes: B batch, C channels of a level, H side."""

from __future__ import annotations

from torch import Tensor, nn

from m6.architecture.image_tokenizer import ImageTokenizerConfig


class PositionNorm(nn.LayerNorm):
    """Layer norm over the channels of each position.

    Unlike group norm, it mixes no information between positions, so a code depends only on its own patch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, C, H, H]`` to the same shape."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ResBlock(nn.Module):
    """Residual block ``x + f(x)``; f is twice a norm, SiLU and a convolution."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*_norm(channels), _conv(channels, channels, kernel_size), *_norm(channels))
        self.last = _conv(channels, channels, kernel_size)
        nn.init.zeros_(self.last.weight)  # a deep stack starts as the identity

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[B, C, H, H]`` to the same shape."""
        return x + self.last(self.branch(x))


class Encoder(nn.Sequential):
    """Maps images ``[B, 3, image_size, image_size]`` to features ``[B, feature_dim, grid_size, grid_size]``.

    All convolutions have kernel size 1, so a feature depends only on its own patch.
    """

    def __init__(self, config: ImageTokenizerConfig) -> None:
        finest, coarsest = config.channels[0], config.channels[-1]
        layers: list[nn.Module] = [
            nn.PixelUnshuffle(config.patch_size),  # folds pixels into channels without mixing patches
            _conv(3 * config.patch_size**2, finest, 1),
        ]
        for level, channels in enumerate(config.channels):
            if level:
                layers += [nn.PixelUnshuffle(2), _conv(4 * config.channels[level - 1], channels, 1)]
            layers += [ResBlock(channels, 1) for _ in range(config.num_res_blocks)]
        super().__init__(*layers, *_norm(coarsest), nn.Conv2d(coarsest, config.feature_dim, 1))


class Decoder(nn.Sequential):
    """Maps features ``[B, feature_dim, grid_size, grid_size]`` to images ``[B, 3, image_size, image_size]``."""

    def __init__(self, config: ImageTokenizerConfig) -> None:
        finest = config.channels[0]
        layers: list[nn.Module] = [_conv(config.feature_dim, config.channels[-1], 3)]
        for level in reversed(range(len(config.channels))):
            channels = config.channels[level]
            layers += [ResBlock(channels, 3) for _ in range(config.num_res_blocks)]
            if level:
                layers += [_conv(channels, 4 * config.channels[level - 1], 3), nn.PixelShuffle(2)]
        head = _conv(finest, 3 * config.patch_size**2, 3)
        super().__init__(*layers, *_norm(finest), head, nn.PixelShuffle(config.patch_size))


def _conv(inputs: int, outputs: int, kernel_size: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2)


def _norm(channels: int) -> tuple[nn.Module, nn.Module]:
    return PositionNorm(channels), nn.SiLU()
