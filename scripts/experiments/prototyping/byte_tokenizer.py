"""Makes a tokenizer whose pieces are single bytes: ``python -m scripts.experiments.prototyping.byte_tokenizer OUT``.

With a vocabulary of 258 the output matrix costs next to nothing, and what is to be learned lies in the layers: a run of
a minute leaves the level of letter frequencies behind, at which no routing differs from another.
"""

import io
import sys
import tempfile
from pathlib import Path

import sentencepiece

from m6.tokenizers.text import MODEL_FILE, M6Tokenizer


def make_byte_tokenizer(out: Path) -> None:
    """Saves a tokenizer of 256 bytes, the unknown piece, and the one letter that SentencePiece insists on."""
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a"]),
        model_writer=buffer,
        model_type="char",
        vocab_size=258,
        byte_fallback=True,
        hard_vocab_limit=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        model_file = Path(folder, MODEL_FILE)
        model_file.write_bytes(buffer.getvalue())
        M6Tokenizer(str(model_file), image_vocab_size=0).save_pretrained(str(out))


if __name__ == "__main__":
    make_byte_tokenizer(Path(sys.argv[1]))
