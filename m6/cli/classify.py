"""``m6 classify``: the most likely of given labels for texts, or for images with a text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from m6.cli.options import check_utf8, open_picture
from m6.errors import UserError
from m6.files import read_lines


def classify(
    command: typer.Context,
    run: Annotated[Path, typer.Option("--checkpoint", help="the folder of a run, or of an exported model")],
    labels: Annotated[list[str], typer.Option("--label", help="one of the labels; give two or more")],
    text: Annotated[str, typer.Argument(help="the text; with --image a question, or a caption that may match")] = "",
    context: Annotated[str, typer.Option(help="what follows the text, if the model learned texts with a context")] = "",
    texts: Annotated[
        Path | None, typer.Option(help="a text file with one text per line; a tab and its context may follow")
    ] = None,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="a picture beside the text; can be repeated")
    ] = None,
) -> None:
    """Prints a line of each text or picture: it, a tab, its most likely label, a tab, the label's probability.

    The probabilities are among the given labels. Whether pictures match a caption is asked with the labels 是 and 不是.
    """
    # Arguments are checked before torch and the model are loaded, as loading takes seconds.
    check_utf8(command, text, context, *labels)
    if bool(text) == bool(texts) or (texts and images):
        raise UserError("classify: give a text, with or without --image, or a file of texts with --texts")
    if context and (texts or images):
        raise UserError("classify: --context follows a text without --image; a context of --texts follows a tab")
    if len({*labels}) < max(2, len(labels)) or not all(label.strip() for label in labels):
        raise UserError(f"classify: --label: expected two or more different labels, found {', '.join(labels)}")
    read = [(text, context)] if texts is None else _read_texts(texts)
    pictures = [open_picture(path) for path in images or ()]
    from m6.checkpoints.finetuning import is_exported
    from m6.checkpoints.loading import load_run_model
    from m6.config.run import load_config
    from m6.data.objectives import context_ids, max_text_tokens
    from m6.generation.captioning import warn_unless_learned
    from m6.generation.likelihood import label_log_likelihoods
    from m6.runs.processes import default_device
    from m6.tokenizers.pictures import square_pixels

    model, processor = load_run_model(run, default_device())
    of_pictures = ["visual_question_answering", "image_text_matching"]
    warn_unless_learned(model, run, of_pictures if pictures else ["text_classification"], "labels")
    config = model.config
    length = config.max_position_embeddings
    if not is_exported(run):
        settings = load_config(run / "config.json").m6
        length = settings.data.sequence_length  # training cut texts to this length
        if settings.objectives.text_classification.with_context and not (pictures or any(after for _, after in read)):
            print("warning: the model learned texts with a context, and none is given", file=sys.stderr)
    objective = "visual_question_answering" if pictures else "text_classification"
    room = max_text_tokens(objective, length, config.num_patches)
    tokenizer = processor.tokenizer
    sources = [tokenizer.encode_ids(each) for each, _ in read]
    if cut := sum(len(source) > room for source in sources):
        print(f"warning: {cut} of {len(sources)} texts are longer than {room} tokens, and cut", file=sys.stderr)
    for source, (_, after) in zip(sources, read, strict=True):
        del source[room:]
        source += context_ids(after, room - len(source), tokenizer)
    pixels = [square_pixels(picture, config.image_size) for picture in pictures]
    if pixels:
        sources *= len(pixels)
    scores = label_log_likelihoods(model, processor, sources, labels, pixels or None)
    best = scores.softmax(dim=1).max(dim=1)
    names: Sequence[object] = images or [each for each, _ in read]
    for name, index, share in zip(names, best.indices.tolist(), best.values.tolist(), strict=True):
        print(f"{name}\t{labels[index]}\t{share:.4f}")


def _read_texts(path: Path) -> list[tuple[str, str]]:
    """The lines of a file as (text before the tab, text after it). Lines without a text are left out."""
    parts = [line.partition("\t") for line in read_lines(path)]
    found = [(text, context) for text, _, context in parts if text.strip()]
    if not found:
        raise UserError(f"{path}: holds no text")
    return found
