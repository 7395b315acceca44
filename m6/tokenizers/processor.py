"""Converts pictures and texts to the model's inputs."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_backends import PilBackend
from transformers.image_transforms import to_pil_image

from m6.tokenizers.special_tokens import IMAGE, SOURCE, TARGET
from m6.tokenizers.text import M6Tokenizer


class M6ImageProcessor(PilBackend):
    """Converts pictures to RGB, pads them with white to a square, resizes them (bicubic), and scales to [-1, 1]."""

    size = {"height": 256, "width": 256}  # noqa: RUF012 - the base class declares it so
    resample = Image.Resampling.BICUBIC
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    do_resize = True
    do_rescale = True
    do_normalize = True

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        """Returns a picture as uint8 ``[3, H, H]``, before it is resized. Overrides a step of the base class."""
        picture = image if isinstance(image, Image.Image) else to_pil_image(image)
        return np.moveaxis(np.asarray(square_rgb(picture)), -1, 0)


def square_rgb(image: Image.Image) -> Image.Image:
    """Rotates a picture upright (EXIF), fills transparent areas with white, and pads it with white to a square."""
    is_square_rgb = image.mode == "RGB" and image.width == image.height
    if is_square_rgb and "transparency" not in image.info and not image.getexif():
        return image  # the common case: "m6 data build" writes such pictures
    picture = ImageOps.exif_transpose(image).convert("RGBA")
    side = max(picture.size)
    canvas = Image.new("RGB", (side, side), "white")
    canvas.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2), mask=picture)
    return canvas


def decode_picture(data: bytes, image_size: int) -> np.ndarray:
    """Decodes a PNG, JPEG or WebP file to uint8 ``[image_size, image_size, 3]``, with the steps of M6ImageProcessor.

    Training uses this function and ``pixel_values``: pictures stay in 8 bits until a micro-batch is stacked.

    Raises:
        Exception: any exception of Pillow, for damaged data.
    """
    with Image.open(io.BytesIO(data)) as image:
        picture = square_rgb(image)
        if picture.size != (image_size, image_size):
            picture = picture.resize((image_size, image_size), M6ImageProcessor.resample)
        return np.asarray(picture)


def pixel_values(pictures: Sequence[np.ndarray], image_size: int) -> torch.Tensor:
    """Stacks N pictures, uint8 ``[H, H, 3]`` with H = image_size, to fp32 ``[N, 3, H, H]`` in [-1, 1]."""
    stacked = np.stack(pictures) if pictures else np.empty((0, image_size, image_size, 3), np.uint8)
    channels_first = torch.from_numpy(stacked).permute(0, 3, 1, 2)
    # In place: the pictures of a micro-batch are the largest tensors that a data worker makes.
    return channels_first.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


class M6Processor(ProcessorMixin):
    """Builds prompts for generation: ``[<image> x P]? source <bos> [prefix]``, padded on the left.

    Args:
        image_processor: image processor with the model's image_size.
        tokenizer: tokenizer of the joint vocabulary.
        num_patches: P, the number of image placeholders for each picture.
    """

    def __init__(self, image_processor: M6ImageProcessor, tokenizer: M6Tokenizer, num_patches: int = 16) -> None:
        super().__init__(image_processor, tokenizer)
        self.num_patches = num_patches

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        target_prefix: str | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Builds the inputs of ``generate``.

        Args:
            images: a picture, or a list of B pictures; None in the list is a prompt without a picture.
            text: the source: a string or B strings. Special tokens in it are read as plain text.
            target_prefix: first tokens of every target after ``<bos>``: a text, or ids such as that of ``<boi>``.
            kwargs: passed to the image processor.

        Returns:
            input_ids, attention_mask and token_type_ids (0 image, 1 source, 2 target; 0 at padding) of int64
            ``[B, S]``, and pixel_values of fp32 ``[N, 3, H, W]`` when there are N > 0 pictures.

        Raises:
            ValueError: neither images nor text is given, or their numbers differ.
        """
        if text is None and images is None:
            raise ValueError("a prompt needs images or text")
        pictures = list(images) if isinstance(images, (list, tuple)) else [images]
        texts = [text] if isinstance(text, str) else list(text or [""] * len(pictures))
        if images is None:
            pictures *= len(texts)
        if len(texts) != len(pictures):
            raise ValueError(f"{len(pictures)} images do not match {len(texts)} texts")
        if isinstance(target_prefix, str):
            target_prefix = self.tokenizer.encode_ids(target_prefix)
        target = [self.tokenizer.bos_token_id, *(target_prefix or ())]
        rows = [
            (
                [self.tokenizer.image_token_id] * (self.num_patches if picture is not None else 0),
                self.tokenizer.encode_ids(source),
                target,
            )
            for picture, source in zip(pictures, texts, strict=True)
        ]
        length = max(sum(map(len, row)) for row in rows)
        input_ids = np.full((len(rows), length), self.tokenizer.pad_token_id, np.int64)
        attention_mask, token_type_ids = np.zeros_like(input_ids), np.zeros_like(input_ids)
        for index, row in enumerate(rows):
            ids = np.concatenate(row)
            # Padding is on the left, so that generated tokens follow the prompt directly.
            input_ids[index, length - len(ids) :] = ids
            attention_mask[index, length - len(ids) :] = 1
            types = np.repeat([IMAGE, SOURCE, TARGET], [len(part) for part in row])
            token_type_ids[index, length - len(ids) :] = types
        data = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        present = [picture for picture in pictures if picture is not None]
        if present:
            data["pixel_values"] = self.image_processor(present, return_tensors="np", **kwargs)["pixel_values"]
        return BatchFeature(data, tensor_type="pt")

    @classmethod
    def _get_arguments_from_pretrained(
        cls, pretrained_model_name_or_path: Any, processor_dict: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        # The base class looks the classes up in the Auto classes, where these two need not be registered.
        return [
            M6ImageProcessor.from_pretrained(pretrained_model_name_or_path, **kwargs),
            M6Tokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs),
        ]
