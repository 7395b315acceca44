"""Loads an image tokenizer of any supported format: ours, or a ``VQModel`` of diffusers from a folder or the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m6.errors import DAMAGED, UserError, first_line, nearest
from m6.files import parse_object
from m6.tokenizers.image.base import CONFIG_FILE, ImageTokenizer
from m6.tokenizers.image.modeling import M6ImageTokenizer


class DiffusersImageTokenizer(ImageTokenizer):
    """A ``VQModel`` of diffusers. ``image_size`` is the model's ``sample_size``.

    diffusers is an optional dependency, imported only in ``from_pretrained``.

    Args:
        model: the ``VQModel``.

    Raises:
        UserError: sample_size is not a multiple of the model's downsampling.
    """

    weights_file = "diffusion_pytorch_model.safetensors"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.image_size = int(model.config.sample_size)
        self.codebook_size = int(model.config.num_vq_embeddings)
        downsampling = 2 ** (len(model.config.block_out_channels) - 1)
        if self.image_size % downsampling:
            raise UserError(f"sample_size {self.image_size} is not a multiple of {downsampling}, the model's reduction")
        self.grid_size = self.image_size // downsampling
        self.num_codes = self.grid_size**2

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """See ``ImageTokenizer.encode``."""
        self._check_pixels(pixels)
        latents = self.model.encode(2 * pixels - 1).latents
        _, _, (_, _, codes) = self.model.quantize(latents)
        return codes.view(len(pixels), self.num_codes)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """See ``ImageTokenizer.decode``."""
        self._check_codes(codes)
        shape = (len(codes), self.grid_size, self.grid_size, self.model.quantize.vq_embed_dim)
        # force_not_quantize: the latents are already vectors of the codebook.
        latents = self.model.quantize.get_codebook_entry(codes.flatten(), shape)
        return ((self.model.decode(latents, force_not_quantize=True).sample + 1) / 2).clamp(0, 1)

    def config_document(self) -> dict[str, Any]:
        """Returns the model's configuration in the format of diffusers."""
        document: dict[str, Any] = {"_class_name": "VQModel"}
        # Names with an underscore are left out: path and version of diffusers must not change the checksum.
        return document | {name: value for name, value in self.model.config.items() if not name.startswith("_")}

    def _weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    @classmethod
    def from_pretrained(cls, name: str | Path) -> DiffusersImageTokenizer:
        """Loads a model from a folder or by its name on the Hub, in evaluation mode.

        Raises:
            UserError: diffusers is not installed, or there is no ``VQModel`` in safetensors.
        """
        try:
            from diffusers import VQModel
        except ImportError:
            raise UserError(f'{name}: a VQModel needs diffusers: pip install "m6-recipes[diffusers]"') from None
        try:
            model = cls(VQModel.from_pretrained(name, use_safetensors=True, low_cpu_mem_usage=False))
        except UserError:
            raise
        except DAMAGED as error:
            raise UserError(f"{name}: not a VQModel: {first_line(error)}") from None
        return model.eval()


def load_image_tokenizer(path_or_name: str | Path) -> ImageTokenizer:
    """Loads our image tokenizer from a folder, or a diffusers ``VQModel`` from a folder or the Hub.

    Returns:
        The tokenizer in evaluation mode.

    Raises:
        UserError: there is no image tokenizer, or it is damaged or of an unknown format.
    """
    file = Path(path_or_name, CONFIG_FILE)
    if not file.is_file():
        # Only a name OWNER/NAME without a local path is looked up on the Hub.
        if Path(path_or_name).exists() or str(path_or_name).count("/") != 1:
            raise UserError(
                f'{path_or_name} holds no image tokenizer ({CONFIG_FILE} is missing); train one with "m6 '
                'train-image-tokenizer", or give the name of a VQModel of the Hub, OWNER/NAME'
            )
        if (parent := Path(path_or_name).parent).is_dir():  # a local folder such as runs/, not an owner on the Hub
            others = [folder.name for folder in parent.iterdir() if (folder / CONFIG_FILE).is_file()]
            hint = nearest(Path(path_or_name).name, others) if others else f"; {parent} holds no image tokenizer"
            raise UserError(f"{path_or_name}: no such folder{hint}")
        return DiffusersImageTokenizer.from_pretrained(str(path_or_name))
    try:
        document = parse_object(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file}: not readable as JSON: {error}") from None
    kind = document.get("model_type") or document.get("_class_name")
    if kind == "m6_image_tokenizer":
        return M6ImageTokenizer.from_pretrained(path_or_name)
    if kind == "VQModel":
        return DiffusersImageTokenizer.from_pretrained(path_or_name)
    raise UserError(f'{file}: expected an image tokenizer of ours or a VQModel of diffusers, found "{kind}"')
