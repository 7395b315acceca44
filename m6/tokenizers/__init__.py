"""The joint vocabulary of text and images: special tokens, text tokenizer, and processor of prompts and pictures."""

from m6.tokenizers.processor import M6ImageProcessor, M6Processor
from m6.tokenizers.special_tokens import NUM_SPECIAL_TOKENS, SPECIAL_TOKENS
from m6.tokenizers.text import M6Tokenizer, load_text_tokenizer

__all__ = [
    "NUM_SPECIAL_TOKENS",
    "SPECIAL_TOKENS",
    "M6ImageProcessor",
    "M6Processor",
    "M6Tokenizer",
    "load_text_tokenizer",
]
