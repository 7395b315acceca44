"""Repainting: which codes are hidden, what the frame keeps, boxes that are refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from m6.errors import UserError
from m6.generation.drawing import HIDDEN, Repaint
from m6.tokenizers.image import ImageTokenizerConfig, M6ImageTokenizer


@pytest.fixture(scope="module")
def image_tokenizer():
    torch.manual_seed(0)
    config = ImageTokenizerConfig(image_size=32, patch_size=8, channels=[8], codebook_size=16, num_codebooks=2)
    return M6ImageTokenizer(config).eval()


def noise(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_the_places_that_the_box_touches_are_hidden(image_tokenizer):
    picture = noise(32, 32)
    codes = Repaint(picture, (9, 0, 16, 17)).known_codes(image_tokenizer).view(4, 4, 2)
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[0:3, 1] = True  # rows 0 to 16, columns 9 to 15 of places of 8 pixels
    assert torch.equal((codes == HIDDEN).all(dim=2), hidden)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).unsqueeze(0) / 255
    expected = image_tokenizer.encode(pixels).view(4, 4, 2)
    assert torch.equal(codes[~hidden], expected[~hidden])


@pytest.mark.parametrize("size", [(32, 32), (64, 40), (40, 64)])
def test_the_frame_stays_to_the_byte(size):
    picture, box = noise(*size), (8, 4, 24, 30)
    drawn = Image.new("RGB", (32, 32), (255, 0, 0))
    framed = np.array(Repaint(picture, box).framed(drawn))
    inside = np.zeros(framed.shape[:2], dtype=bool)
    inside[4:30, 8:24] = True
    assert (framed[~inside] == np.array(picture)[~inside]).all()
    assert (framed[inside] == (255, 0, 0)).all()


def test_the_frame_is_rgb_on_white():
    clear = Image.new("RGBA", (32, 32), (0, 0, 255, 0))
    grey = Image.fromarray(np.full((32, 32), 0x1234, dtype=np.uint16))
    for picture, colour in ((clear, (255, 255, 255)), (grey, (0x12, 0x12, 0x12))):
        framed = Repaint(picture, (8, 4, 24, 30)).framed(Image.new("RGB", (32, 32), (255, 0, 0)))
        assert (framed.mode, framed.getpixel((0, 0)), framed.getpixel((8, 4))) == ("RGB", colour, (255, 0, 0))


def test_a_wide_picture_is_padded_as_in_training(image_tokenizer):
    """64 x 32 pixels are the middle half of a square."""
    codes = Repaint(noise(64, 32), (0, 0, 32, 16)).known_codes(image_tokenizer).view(4, 4, 2)
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[1, 0:2] = True
    assert torch.equal((codes == HIDDEN).all(dim=2), hidden)


@pytest.mark.parametrize("box", [(0, 0, 0, 4), (4, 4, 2, 8), (0, 0, 33, 4), (-1, 0, 4, 4), (0, 30, 4, 41)])
def test_boxes_outside_of_the_picture(box):
    with pytest.raises(UserError, match=r"the mask .* is empty or leaves the picture of 32 x 40 pixels"):
        Repaint(noise(32, 40), box)
