"""Repainting (inpainting): draws a part of an image anew and keeps the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from torch import Tensor

from m6.data.pictures import to_unit_range
from m6.errors import UserError
from m6.generation.drawing import HIDDEN
from m6.tokenizers.pictures import square_rgb, upright
from m6.tokenizers.processor import M6ImageProcessor

if TYPE_CHECKING:
    from m6.tokenizers.image import ImageTokenizer


@dataclass(frozen=True)
class Repaint:
    """An image, and the box to draw anew.

    Attributes:
        picture: an image of any size. It is rotated upright, padded with white to a square and resized, as in
            training.
        box: left, top, right and bottom in pixels of the upright image; right and bottom are exclusive.

    Raises:
        UserError: the box is empty or leaves the image.
    """

    picture: Image.Image
    box: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        left, top, right, bottom = self.box
        width, height = self._upright().size
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise UserError(
                f"the mask {left},{top},{right},{bottom} (left, top, right, bottom) is empty or leaves the picture of "
                f"{width} x {height} pixels; expected 0 <= left < right <= {width} and 0 <= top < bottom <= {height}"
            )

    def known_codes(self, image_tokenizer: ImageTokenizer) -> Tensor:
        """Encodes the image: int64 [1, N], HIDDEN at every grid position touched by the box."""
        square = square_rgb(self.picture)
        size = (image_tokenizer.image_size, image_tokenizer.image_size)
        pixels = np.array(square.resize(size, M6ImageProcessor.resample))
        device = next(image_tokenizer.parameters()).device
        codes = image_tokenizer.encode(to_unit_range(pixels[None], device)).cpu()
        side = math.isqrt(image_tokenizer.num_codes // image_tokenizer.codes_per_place)
        places = codes.view(side, side, -1)
        left, top, right, bottom = self._box_in_square()
        rows, columns = (
            slice(first * side // square.width, -(-last * side // square.width))
            for first, last in ((top, bottom), (left, right))
        )
        places[rows, columns] = HIDDEN
        return places.view(1, -1)

    def framed(self, drawn: Image.Image) -> Image.Image:
        """Returns the upright image as RGB on white, in its own size, with the box from the drawn image."""
        square, box = square_rgb(self.picture).copy(), self._box_in_square()
        square.paste(drawn.resize(square.size, M6ImageProcessor.resample).crop(box), box)
        width, height = self._upright().size
        left, top = (square.width - width) // 2, (square.height - height) // 2
        return square.crop((left, top, left + width, top + height))

    def _upright(self) -> Image.Image:
        return upright(self.picture)

    def _box_in_square(self) -> tuple[int, int, int, int]:
        width, height = self._upright().size
        side = max(width, height)
        left, top = (side - width) // 2, (side - height) // 2
        return self.box[0] + left, self.box[1] + top, self.box[2] + left, self.box[3] + top
