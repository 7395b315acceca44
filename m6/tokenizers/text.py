"""The text tokenizer: a SentencePiece unigram model within the joint vocabulary of text and image codes.

Order of the joint ids: ``text_vocab_size`` text pieces, the special tokens, ``image_vocab_size`` image codes.
"""

import functools
import hashlib
import itertools
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import AddedToken, BatchEncoding, PreTrainedTokenizer

from m6.architecture.names import NUM_SPECIAL_TOKENS, SPECIAL_TOKENS, without_auto_map
from m6.architecture.settings import LARGEST_VOCABULARY
from m6.errors import DAMAGED, UserError
from m6.files import atomic_path, check_readable

MODEL_FILE = "sentencepiece.model"
MAX_PIECE_CHARACTERS = 16  # longest text piece; bounds the characters of a number of tokens

_SENTENCE_ENDS = "。！？!?；…\n"
_CLOSING_MARKS = '”’」』）)】》"'
_SENTENCE = re.compile(f"[^{_SENTENCE_ENDS}]*[{_SENTENCE_ENDS}]*[{_CLOSING_MARKS}]*")

# NFKC would turn Chinese punctuation (，！？：（）) into ASCII, and generated text could never contain it. So only
# full-width letters and digits, special spaces and invisible characters are folded. Zero-width joiners are kept: emoji
# need them.
_WIDE_TO_ASCII = {0xFEE0 + ord(c): c for c in string.digits + string.ascii_letters}
_SPACES = dict.fromkeys("\t\u00a0\u202f\u205f\u2581\u3000" + "".join(map(chr, range(0x2000, 0x200B))), " ")
_CONTROLS = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0xAD, 0x200B, 0x2060, 0xFEFF]
_NORMALISATION = str.maketrans({**dict.fromkeys(_CONTROLS, ""), **_WIDE_TO_ASCII, **_SPACES})


def normalize_text(text: str) -> str:
    """Folds full-width letters and digits to ASCII and special spaces (and ▁) to a space; removes control characters.

    Chinese punctuation is unchanged. SentencePiece later strips the ends and collapses runs of spaces.
    """
    return text.translate(_NORMALISATION)


def split_sentences(text: str) -> list[str]:
    """Cuts a text after each sentence end and its closing marks. The parts join to the text."""
    return [sentence for sentence in _SENTENCE.findall(text) if sentence]


def _joined(words: Sequence[str]) -> str:
    """The text of words, with spaces between words of letters that are separated by spaces."""
    text = ""
    for word in words:
        text += f" {word}" if text[-1:].isascii() and word[:1].isascii() and text else word
    return text


class M6Tokenizer(PreTrainedTokenizer):
    """Slow (pure Python) Hugging Face tokenizer of the joint vocabulary.

    Image codes are the tokens ``<code_0>``, ``<code_1>``, ... A call gives ``<bos> text``, padded on the left: a prompt
    for ``generate`` to continue. ``M6Processor`` makes prompts with an image or a source.

    Args:
        vocab_file: file of the SentencePiece model.
        image_vocab_size: number of image codes at the end of the joint vocabulary.
    """

    vocab_files_names = {"vocab_file": MODEL_FILE}  # noqa: RUF012 - the base class declares it so
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"

    def __init__(self, vocab_file: str, image_vocab_size: int = 8192, **kwargs: Any) -> None:
        if type(image_vocab_size) is not int or not 0 <= image_vocab_size <= LARGEST_VOCABULARY:
            raise ValueError(f"image_vocab_size is {image_vocab_size!r}, expected 0 to {LARGEST_VOCABULARY}")
        # Kept in memory: the file may be gone by the time the tokenizer is saved with a checkpoint.
        self._model_bytes = Path(vocab_file).read_bytes()
        self.sp_model = sentencepiece.SentencePieceProcessor(model_proto=self._model_bytes)
        self.text_vocab_size: int = self.sp_model.get_piece_size()
        self.image_vocab_size = image_vocab_size
        named = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "mask", "sep", "image", "boi", "eoi")}
        for name in named.keys() & kwargs.keys():
            if str(kwargs[name]) != named[name]:
                raise UserError(f"{name} is {str(kwargs[name])!r}, expected {named[name]!r}: the model has learned it")
        kwargs |= named | {"extra_special_tokens": [t for t in SPECIAL_TOKENS if t not in named.values()]}
        kwargs = {"padding_side": self.padding_side, **without_auto_map(self, kwargs), "special_tokens_pattern": "bos"}
        super().__init__(vocab_file=vocab_file, image_vocab_size=image_vocab_size, **kwargs)

    @property
    def vocab_size(self) -> int:
        """Size of the joint vocabulary, special tokens and image codes included."""
        return self.text_vocab_size + NUM_SPECIAL_TOKENS + self.image_vocab_size

    @property
    def code_mask_token_id(self) -> int:
        """Id of ``<code_mask>``, the placeholder of a hidden image code."""
        return self.text_vocab_size + SPECIAL_TOKENS.index("<code_mask>")

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the SentencePiece model and image_vocab_size. Equal fingerprints mean equal ids."""
        return hashlib.sha256(self._model_bytes + f"image_vocab_size={self.image_vocab_size}".encode()).hexdigest()

    def encode_ids(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Encodes text with SentencePiece; every id is below ``text_vocab_size``.

        Strings such as ``<mask>`` in the text are plain text here, so data cannot inject special tokens.

        Args:
            text: the text.
            max_tokens: the ids are cut to this number. A long text is not read to its end.
        """
        if max_tokens is None:
            return self.sp_model.encode(normalize_text(text))
        return self.sp_model.encode(normalize_text(text[: max_tokens * MAX_PIECE_CHARACTERS]))[:max_tokens]

    def writable(self, text: str) -> str:
        """Returns the text after encoding and decoding: the form a model can write, such as ASCII digits."""
        return str(self.decode(self.encode_ids(text)))

    def split_sentence_ids(self, ids: Sequence[int]) -> list[list[int]]:
        """Cuts piece ids after each sentence end and its closing marks."""
        ends, closing = self._sentence_marks
        sentences: list[list[int]] = [[]]
        ended = False
        for token in ids:
            if ended and token not in ends and token not in closing:
                sentences.append([])
                ended = False
            sentences[-1].append(token)
            ended = ended or token in ends
        return sentences

    def image_code_to_id(self, code: int) -> int:
        """Returns the joint id of an image code; ValueError if it is outside of ``[0, image_vocab_size)``."""
        if not 0 <= code < self.image_vocab_size:
            raise ValueError(f"image code {code} is outside [0, {self.image_vocab_size})")
        return self.text_vocab_size + NUM_SPECIAL_TOKENS + code

    def id_to_image_code(self, token_id: int) -> int:
        """Returns the image code of a joint id; ValueError if the id is not an image code."""
        code = token_id - self.text_vocab_size - NUM_SPECIAL_TOKENS
        if not 0 <= code < self.image_vocab_size:
            raise ValueError(f"id {token_id} is not an image code; those are [{self.image_code_to_id(0)}, {len(self)})")
        return code

    def add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Raises UserError for new tokens: image codes end the vocabulary, and models have no room for more."""
        tokens = [new_tokens] if isinstance(new_tokens, str | AddedToken) else list(new_tokens)
        for token in map(str, tokens):
            if token not in self._vocab:
                raise UserError(f"{token!r}: no token can be added to the vocabulary of an M6 model")
        return super().add_tokens(tokens, special_tokens=special_tokens)

    def _encode_plus(self, *args: Any, return_offsets_mapping: bool = False, **kwargs: Any) -> BatchEncoding:
        if return_offsets_mapping:
            raise NotImplementedError(
                "return_offsets_mapping: SentencePiece pieces of folded text have no offsets here"
            )
        return super()._encode_plus(*args, **kwargs)

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens of the joint vocabulary."""
        return dict(self._vocab)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Joins tokens to a string. Special tokens and image codes are written out."""
        parts: list[str] = []
        for is_text, run in itertools.groupby(tokens, lambda token: self._vocab[token] < self.text_vocab_size):
            run_tokens = list(run)
            parts += [self.sp_model.decode_pieces(run_tokens)] if is_text else run_tokens
        # Without a piece for the space, SentencePiece encodes ▁ in byte pieces, and decoding leaves it as ▁.
        return "".join(parts).replace("▁", " ")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Writes the SentencePiece model atomically; returns its path. ``save_pretrained`` calls it."""
        path = Path(save_directory, (f"{filename_prefix}-" if filename_prefix else "") + MODEL_FILE)
        with atomic_path(path) as temporary:
            temporary.write_bytes(self._model_bytes)
        return (str(path),)

    @functools.cached_property
    def _vocab(self) -> dict[str, int]:
        pieces = self.sp_model.id_to_piece(list(range(self.text_vocab_size)))
        codes = (f"<code_{code}>" for code in range(self.image_vocab_size))
        # No piece equals a special token or code: in training, letters and punctuation never share a piece.
        return {token: index for index, token in enumerate(itertools.chain(pieces, SPECIAL_TOKENS, codes))}

    @functools.cached_property
    def _sentence_marks(self) -> tuple[frozenset[int], frozenset[int]]:
        """Ids of pieces with a sentence end, and of pieces of only closing marks."""
        ends, closing = {self.sp_model.piece_to_id("<0x0A>")}, set()
        for index, piece in enumerate(self.sp_model.id_to_piece(list(range(self.text_vocab_size)))):
            bare = piece.rstrip(_CLOSING_MARKS)
            if not bare:
                closing.add(index)
            elif bare[-1] in _SENTENCE_ENDS:
                ends.add(index)
        return frozenset(ends), frozenset(closing)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.sp_model.encode(normalize_text(text), out_type=str)

    def _convert_token_to_id(self, token: str) -> int:
        if token not in self._vocab:
            raise ValueError(f'"{token}" is not a token of this vocabulary')
        return self._vocab[token]

    def _convert_id_to_token(self, index: int) -> str:
        if index < self.text_vocab_size:
            return self.sp_model.id_to_piece(index)
        return f"<code_{self.id_to_image_code(index)}>"


def load_text_tokenizer(path: str | Path) -> M6Tokenizer:
    """Loads a tokenizer folder.

    Raises:
        StorageError: the folder cannot be read.
        UserError: ``path`` holds no tokenizer, or a damaged one.
    """
    check_readable(Path(path, MODEL_FILE), Path(path, "tokenizer_config.json"))
    if not Path(path, MODEL_FILE).is_file():
        raise UserError(f'{path} holds no tokenizer ({MODEL_FILE} is missing); train one with "m6 data tokenizer"')
    try:
        tokenizer = M6Tokenizer.from_pretrained(path)
    except DAMAGED as error:
        raise UserError(f"{path}: {MODEL_FILE} or tokenizer_config.json is damaged: {error}") from None
    if tokenizer.text_vocab_size == 0:  # SentencePiece reads an empty file
        raise UserError(f"{path}: {MODEL_FILE} is damaged: it has no pieces")
    return tokenizer
