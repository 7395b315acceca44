"""The joint vocabulary of text and image codes: special tokens, text tokenizer, and processor of prompts and images."""

from typing import TYPE_CHECKING, Any

from m6.architecture.names import NUM_SPECIAL_TOKENS, SPECIAL_TOKENS
from m6.tokenizers.text import M6Tokenizer, load_text_tokenizer

if TYPE_CHECKING:
    from m6.tokenizers.processor import M6ImageProcessor, M6Processor

__all__ = [
    "NUM_SPECIAL_TOKENS",
    "SPECIAL_TOKENS",
    "M6ImageProcessor",
    "M6Processor",
    "M6Tokenizer",
    "load_text_tokenizer",
]


def __getattr__(name: str) -> Any:
    """Loads the processors on first use: transformers takes seconds to import, and reading data does not need it."""
    if name in ("M6ImageProcessor", "M6Processor"):
        from m6.tokenizers import processor

        return getattr(processor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
