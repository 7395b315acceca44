"""``m6 data codes``: turns the pictures of a data folder into codes."""

from pathlib import Path
from typing import Annotated, Optional

import typer


def codes(
    data: Annotated[Path, typer.Argument(help='The data folder, made by "m6 data build".')],
    image_tokenizer: Annotated[
        str, typer.Option(help="Folder of an image tokenizer, or the name of a VQModel of the Hub.")
    ],
    source: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer evaluates the annotation on Python 3.10
        typer.Option(help="A source to encode; may be given often; default all with pictures and captions."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures encoded at once.")] = 64,
    max_bad_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="More bad pictures than this share are an error.")
    ] = 0.01,
) -> None:
    """Writes the codes of the pictures beside the shards, bound to the tokenizer's checksum."""
    from m6.data.codes import write_codes
    from m6.data.manifest import Manifest
    from m6.device import default_device
    from m6.tokenizers.image import load_image_tokenizer

    manifest = Manifest.load(data)
    device = default_device()
    tokenizer = load_image_tokenizer(image_tokenizer).to(device)
    folder, written = write_codes(
        manifest, tokenizer, source, batch_size=batch_size, max_bad_share=max_bad_share, device=device
    )
    typer.echo(
        f"{folder} holds {written.num_codes} codes of [0, {written.codebook_size:,}) for each picture, tokenizer "
        f"{written.tokenizer[:16]}"
    )
    for name, splits in written.sources.items():
        rows = ", ".join(f"{split} {entry.rows:,}" for split, entry in splits.items())
        typer.echo(f"  {name}: {rows} rows, skipped {sum(written.skipped.get(name, {}).values())}")
