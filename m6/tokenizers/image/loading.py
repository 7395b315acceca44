"""Loads an image tokenizer of any supported format."""

from __future__ import annotations

from pathlib import Path

from m6.errors import UserError, nearest
from m6.files import parse_object
from m6.tokenizers.image.base import CONFIG_FILE, ImageTokenizer
from m6.tokenizers.image.modeling import M6ImageTokenizer


def load_image_tokenizer(path_or_name: str | Path) -> ImageTokenizer:
    """Loads our image tokenizer from a folder, or a diffusers ``VQModel`` from a folder or the Hub.

    Returns:
        The tokenizer in evaluation mode.

    Raises:
        UserError: there is no image tokenizer, or it is damaged or of an unknown format.
    """
    from m6.tokenizers.image.diffusers_vq import DiffusersImageTokenizer

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
