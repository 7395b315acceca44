"""The interface of all image tokenizers."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from m6.files import atomic_path, write_json

CONFIG_FILE = "config.json"


class ImageTokenizer(nn.Module, ABC):
    """Encodes square images to a fixed number of codes, and decodes codes to images.

    Attributes:
        weights_file: name of the file with the weights.
        image_size: side of an image in pixels.
        codebook_size: codes are in ``[0, codebook_size)``.
        codes_per_place: k: a grid position has k consecutive codes, one of each of k codebooks. The code of codebook b
            is in ``[b * codebook_size / k, (b + 1) * codebook_size / k)``.
        num_codes: N, the number of codes of an image: a square grid of positions, row by row.
    """

    weights_file: str
    image_size: int
    codebook_size: int
    codes_per_place: int = 1
    num_codes: int

    @abstractmethod
    def encode(self, pixels: Tensor) -> Tensor:
        """Encodes images ``[B, 3, image_size, image_size]`` with values in [0, 1] to int64 codes ``[B, N]``."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Decodes codes ``[B, N]`` to images ``[B, 3, image_size, image_size]`` with values in [0, 1]."""

    @abstractmethod
    def config_document(self) -> dict[str, Any]:
        """Returns the contents of ``config.json``."""

    def _weights(self) -> dict[str, Tensor]:
        return self.state_dict()

    @property
    def checksum(self) -> str:
        """SHA-256 of configuration and weights in hexadecimal. It identifies the tokenizer of stored codes."""
        digest = hashlib.sha256(json.dumps(self.config_document(), sort_keys=True).encode())
        # Names, types and shapes are hashed too: equal bytes with other shapes make another tokenizer.
        for name, tensor in sorted(self._weights().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes ``config.json`` and the weights to ``folder``, each file atomically."""
        folder = Path(folder)
        # The weights first: a folder with config.json is complete.
        with atomic_path(folder / self.weights_file) as temporary:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._weights().items()}
            save_file(tensors, temporary, metadata={"format": "pt"})
        write_json(folder / CONFIG_FILE, self.config_document())

    def _check_pixels(self, pixels: Tensor) -> None:
        expected = (3, self.image_size, self.image_size)
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != expected:
            raise ValueError(f"pixels: expected [B, {', '.join(map(str, expected))}], found {list(pixels.shape)}")

    def _check_codes(self, codes: Tensor) -> None:
        if codes.ndim != 2 or codes.shape[1] != self.num_codes:
            raise ValueError(f"codes: expected [B, {self.num_codes}], found {list(codes.shape)}")
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.codebook_size:
            raise ValueError(
                f"codes: expected [0, {self.codebook_size}), found {int(codes.min())} to {int(codes.max())}"
            )
