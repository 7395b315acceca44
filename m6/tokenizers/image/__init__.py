"""Image tokenizers: our VQ autoencoder, or a ``VQModel`` of diffusers, behind one interface."""

from m6.architecture.image_tokenizer import ImageTokenizerConfig
from m6.tokenizers.image.base import ImageTokenizer
from m6.tokenizers.image.loading import load_image_tokenizer
from m6.tokenizers.image.modeling import M6ImageTokenizer

__all__ = ["ImageTokenizer", "ImageTokenizerConfig", "M6ImageTokenizer", "load_image_tokenizer"]
