"""Our image tokenizer, a VQ autoencoder. Shapes of its networks: B batch, C channels of a level, H side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from m6.architecture.image_tokenizer import ImageTokenizerConfig
from m6.errors import DAMAGED, UserError, first_line
from m6.files import check_readable
from m6.tokenizers.image.base import CONFIG_FILE, ImageTokenizer
from m6.validation import validate


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


class Reconstruction(NamedTuple):
    """Result of a training pass: images ``[B, 3, H, H]`` (unclamped), codes ``[B, N]``, and the commitment loss.

    Pixels are not clamped to [0, 1]: clamping would stop their gradients.
    """

    pixels: Tensor
    codes: Tensor
    commitment_loss: Tensor


class M6ImageTokenizer(ImageTokenizer):
    """A VQ autoencoder with a codebook of moving averages of the features (arXiv 1711.00937, appendix A.1)."""

    weights_file = "model.safetensors"

    def __init__(self, config: ImageTokenizerConfig) -> None:
        from vector_quantize_pytorch import VectorQuantize

        super().__init__()
        self.config = config
        self.image_size, self.codes_per_place = config.image_size, config.num_codebooks
        self.codebook_size = config.vocab_size
        self.num_codes = config.num_codebooks * config.grid_size**2
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quantizer = VectorQuantize(
            dim=config.feature_dim,
            codebook_dim=config.codebook_dim,
            heads=config.num_codebooks,
            separate_codebook_per_head=config.num_codebooks > 1,
            codebook_size=config.codebook_size,
            decay=config.codebook_decay,
            commitment_weight=config.commitment_weight,
            threshold_ema_dead_code=config.dead_code_threshold,
            use_cosine_sim=True,  # codes of unit length, see codebook_dim
            accept_image_fmap=True,
        )

    def forward(self, pixels: Tensor) -> Reconstruction:
        """Encodes, quantises and decodes. In training mode this also updates the codebook."""
        self._check_pixels(pixels)
        features = self.encoder(2 * pixels - 1).float()
        # In 16 bits small updates of the moving average would round to nothing, and near codes would be equal.
        with torch.autocast(pixels.device.type, enabled=False):
            quantized, codes, commitment_loss = self.quantizer(features)
        reconstruction = (self.decoder(quantized).float() + 1) / 2
        return Reconstruction(reconstruction, self._flatten(codes), commitment_loss.sum())

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """See ``ImageTokenizer.encode``."""
        self._check_pixels(pixels)
        # Frozen even in training mode: encoding must never change the codebook.
        _, codes, _ = self.quantizer(self.encoder(2 * pixels - 1), freeze_codebook=True)
        return self._flatten(codes)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """See ``ImageTokenizer.decode``."""
        self._check_codes(codes)
        side, books = self.config.grid_size, self.config.num_codebooks
        indices = codes.view(-1, side, side, books) - self._first_codes(codes.device)
        features = self.quantizer.get_output_from_indices(indices if books > 1 else indices.squeeze(-1))
        return ((self.decoder(features) + 1) / 2).clamp(0, 1)

    def _flatten(self, indices: Tensor) -> Tensor:
        """Maps indices in the codebooks, [B, h, h] or [B, h, h, books], to codes [B, N]."""
        books = self.config.num_codebooks
        return (indices.reshape(len(indices), -1, books) + self._first_codes(indices.device)).flatten(1)

    def _first_codes(self, device: torch.device) -> Tensor:
        """The first code of each codebook, int64 [books]."""
        return torch.arange(self.config.num_codebooks, device=device) * self.config.codebook_size

    def config_document(self) -> dict[str, Any]:
        """Returns the configuration as JSON."""
        # A single codebook is not named: the checksums of such tokenizers are older than the choice.
        return self.config.model_dump(exclude={"num_codebooks"} if self.config.num_codebooks == 1 else None)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> M6ImageTokenizer:
        """Loads what ``save_pretrained`` wrote, in evaluation mode.

        Raises:
            StorageError: it cannot be read.
            UserError: it is missing or damaged.
        """
        folder = Path(folder)
        check_readable(folder / CONFIG_FILE, folder / cls.weights_file)
        try:
            document = json.loads((folder / CONFIG_FILE).read_bytes())
            tokenizer = cls(validate(ImageTokenizerConfig, document, ""))
            tokenizer.load_state_dict(load_file(folder / cls.weights_file))
        except UserError as error:
            raise UserError(f"{folder / CONFIG_FILE}: {error}") from None
        except (*DAMAGED, SafetensorError) as error:
            raise UserError(f"{folder}: not a whole image tokenizer: {first_line(error)}") from None
        return tokenizer.eval()
