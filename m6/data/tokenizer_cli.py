"""``m6 data tokenizer``: trains the text tokenizer of a data folder."""

from pathlib import Path
from typing import Annotated

import typer


def tokenizer(
    data: Annotated[Path, typer.Argument(help='The data folder, made by "m6 data build".')],
    out: Annotated[Path, typer.Option(help="The tokenizer folder to make.")],
    vocab_size: Annotated[int, typer.Option(min=258, help="Text pieces, 256 of them for single bytes.")] = 21128,
    image_vocab_size: Annotated[int, typer.Option(min=0, help="Image codes in the joint vocabulary.")] = 8192,
    character_coverage: Annotated[
        float, typer.Option(min=0.9, max=1.0, help="Share of the characters that get pieces; the rest becomes bytes.")
    ] = 0.9998,
    sample_megabytes: Annotated[int, typer.Option(min=1, help="Text to train on, a random sample of rows.")] = 256,
) -> None:
    """Trains a SentencePiece tokenizer on the train split of a data folder."""
    from m6.data.manifest import Manifest
    from m6.tokenizers.text import train_text_tokenizer

    trained = train_text_tokenizer(
        Manifest.load(data),
        out,
        vocab_size,
        image_vocab_size=image_vocab_size,
        character_coverage=character_coverage,
        sample_bytes=sample_megabytes << 20,
    )
    typer.echo(
        f"{out} holds {trained.text_vocab_size:,} text pieces; with special tokens and {image_vocab_size:,} image "
        f"codes the vocabulary is {trained.vocab_size:,}, fingerprint {trained.fingerprint[:12]}"
    )
