"""From codes to pictures."""

import numpy as np
import torch

from m6.generation.pipeline import paint
from m6.tokenizers.image import ImageTokenizerConfig, M6ImageTokenizer


def test_paint_rounds_to_the_nearest():
    torch.manual_seed(0)
    config = ImageTokenizerConfig(image_size=16, patch_size=2, channels=[8, 16], codebook_size=12, codebook_dim=4)
    tokenizer = M6ImageTokenizer(config).eval()
    codes = torch.arange(32).view(2, 16) % 12
    exact = 255 * tokenizer.decode(codes).detach().permute(0, 2, 3, 1).double().numpy()
    # Half a step, and what multiplying by 255 in fp32 rounds off.
    for picture, expected in zip(paint(tokenizer, codes), exact, strict=True):
        assert np.abs(np.asarray(picture) - expected).max() <= 0.5 + 255 * 2**-23
