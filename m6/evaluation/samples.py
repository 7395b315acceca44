"""Unedited samples of a model's output: captions of test images and continuations of test passages."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from m6.data.manifest import Manifest
from m6.data.order import permuted
from m6.data.reader import open_split
from m6.files import atomic_path
from m6.formatting import markdown_table
from m6.generation.captioning import caption, continue_as_learned
from m6.model.modeling import M6ForConditionalGeneration
from m6.tokenizers.processor import M6Processor

PICTURES = 64  # images captioned per source
SHOWN = 5  # samples shown per source
PROMPT_CHARACTERS = 10  # characters of a passage used as the prompt


def write_samples(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    manifest: Manifest,
    sources: list[str],
    folder: Path,
    split: str = "test",
) -> str:
    """Captions images and continues passages of a split.

    The samples are the first rows in a fixed random order: they are not selected by quality.

    Args:
        model: the model in evaluation mode.
        processor: processor of the model.
        manifest: manifest of the data folder.
        sources: names of the sources; other kinds than images and texts are skipped.
        folder: folder for the shown images (PNG), in the same folder as the Markdown file.

    Returns:
        Markdown. For each source of images: the number of captions equal to the reference, among up to ``PICTURES``
        images, and the first ``SHOWN`` captions. For each source of texts: ``SHOWN`` continuations.
    """
    parts = []
    for source in sources:
        if manifest.split(source, split).rows == 0:
            continue
        if manifest.sources[source].kind == "image_text":
            parts.append(_captions(model, processor, manifest, source, folder, split))
        elif manifest.sources[source].kind == "text":
            parts.append(_continuations(model, processor, manifest, source, split))
    return "\n\n".join(parts)


def _captions(
    model: M6ForConditionalGeneration, processor: M6Processor, manifest: Manifest, source: str, folder: Path, split: str
) -> str:
    rows = list(_rows(manifest, source, split, PICTURES))
    pictures = [Image.open(io.BytesIO(row["image"])) for row in rows]
    longest = max(len(processor.tokenizer.encode_ids(row["text"])) for row in rows)
    # Room for the longest reference, up to the model's length.
    most = min(max(24, longest + 1), model.config.max_position_embeddings)
    texts = caption(model, processor, pictures, num_beams=1, max_new_tokens=most, do_sample=False)
    exact = sum(text == processor.tokenizer.writable(row["text"]) for text, row in zip(texts, rows, strict=True))
    lines = [
        f"**{source}**: {exact} of {len(rows)} {split} pictures are described with exactly the reference's words.",
        "",
    ]
    shown = []
    for index in range(min(SHOWN, len(rows))):
        file = folder / f"{source}_{index}.png"
        with atomic_path(file) as temporary:
            pictures[index].save(temporary, format="PNG")
        shown.append([f"![{file.name}]({folder.name}/{file.name})", _cell(texts[index]), _cell(rows[index]["text"])])
    return "\n".join([*lines, markdown_table(["picture", "generated", "reference"], shown, "lll")])


def _continuations(
    model: M6ForConditionalGeneration, processor: M6Processor, manifest: Manifest, source: str, split: str
) -> str:
    prompts = [row["text"][:PROMPT_CHARACTERS] for row in _rows(manifest, source, split, SHOWN)]
    texts = continue_as_learned(model, processor, prompts, max_new_tokens=32, do_sample=False)
    lines = [f"**{source}**: greedy continuations of the first {PROMPT_CHARACTERS} characters of {split} passages.", ""]
    lines += [
        f"- {_cell(prompt)} → {_cell(text.removeprefix(prompt))}" for prompt, text in zip(prompts, texts, strict=True)
    ]
    return "\n".join(lines)


def _rows(manifest: Manifest, source: str, split: str, number: int) -> Iterator[dict[str, Any]]:
    data = open_split(manifest, source, split)
    for index in range(min(number, len(data))):
        yield data[permuted(index, len(data), key=0)]


def _cell(text: str) -> str:
    """Returns a text as one line with escaped bars, for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
