"""Preprocessing of images: upright, square, RGB, and scaled for the model."""

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageOps

from m6.colours import to_rgba

RESAMPLE = Image.Resampling.BICUBIC


def upright(image: Image.Image) -> Image.Image:
    """Rotates an image by its EXIF data. Damaged EXIF data are ignored."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # Pillow raises many types for damaged EXIF data
        return image


def _has_exif(image: Image.Image) -> bool:
    try:
        return bool(image.getexif())
    except Exception:
        return True


def square_rgb(image: Image.Image) -> Image.Image:
    """Rotates an image upright (EXIF), fills transparent areas with white, and pads it with white to a square."""
    is_square_rgb = image.mode == "RGB" and image.width == image.height
    if is_square_rgb and "transparency" not in image.info and not _has_exif(image):
        return image  # the common case, written by "m6 data build"
    picture = to_rgba(upright(image))
    side = max(picture.size)
    canvas = Image.new("RGB", (side, side), "white")
    canvas.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2), mask=picture)
    return canvas


def square_pixels(image: Image.Image, image_size: int) -> np.ndarray:
    """Returns an image as uint8 ``[image_size, image_size, 3]``, see ``square_rgb``."""
    picture = square_rgb(image)
    if picture.size != (image_size, image_size):
        picture = picture.resize((image_size, image_size), RESAMPLE)
    return np.asarray(picture)


def decode_picture(data: bytes, image_size: int) -> np.ndarray:
    """Decodes a PNG, JPEG or WebP file to uint8 ``[image_size, image_size, 3]``, like M6ImageProcessor.

    Training uses this function and then ``pixel_values``: images stay in 8 bits until a micro-batch is stacked.

    Raises:
        Exception: any exception of Pillow, for damaged data.
    """
    with Image.open(io.BytesIO(data)) as image:
        return square_pixels(image, image_size)


def pixel_values(pictures: Sequence[np.ndarray], image_size: int) -> torch.Tensor:
    """Stacks N images, uint8 ``[H, H, 3]`` with H = image_size, to fp32 ``[N, 3, H, H]`` in [-1, 1]."""
    stacked = np.stack(pictures) if pictures else np.empty((0, image_size, image_size, 3), np.uint8)
    channels_first = torch.from_numpy(stacked).permute(0, 3, 1, 2)
    # In place: the images of a micro-batch are the largest tensors of a data worker.
    return channels_first.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)
