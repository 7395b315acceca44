"""Writes the inputs of a corpus without any stage of it: what its filters and searches for copies started from.

    python scripts/experiments/corpus/raw.py [RECIPE] [FOLDER]     (packages.json and data/zh_raw_texts by default)

The corpus of the recipe must be built. Each input becomes a JSONL file with a column "split". Training documents are as
they were read, copies included. Validation and test documents are those of the corpus, so that models of both sets have
the same validation. Documents that share 32 letters with one of these are left out of training here too: the
comparison is about what is learned, not about what was seen before.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from m6.corpus.plan import make_plan
from m6.corpus.reading import read_part
from m6.corpus.recipe import CorpusRecipe, load_recipe
from m6.corpus.text_copies import ngram_hashes, shares_ngram
from m6.data.build import check_row
from m6.data.manifest import Manifest, Split
from m6.data.reader import open_split
from m6.files import atomic_path

HELD_OUT: tuple[Split, ...] = ("validation", "test")


def held_out(manifest: Manifest, source: str) -> Iterator[tuple[str, Split]]:
    """The passages of a source that are held out, with their split."""
    for split in HELD_OUT:
        if manifest.split(source, split).rows:
            yield from ((row["text"], split) for row in open_split(manifest, source, split))


def raw_documents(recipe: CorpusRecipe, folder: Path) -> Iterator[tuple[str, str]]:
    """(input, text) of each document that can be read."""
    plan = make_plan(recipe)
    for part in plan.parts:
        for row in read_part(recipe, plan, part, folder / "fetched"):
            row, problem = check_row(row, "text", max_chars=recipe.document_chars)
            if problem is None:
                yield part.input, row.text


def main(recipe: CorpusRecipe, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    manifest, ngram_chars = Manifest.load(recipe.out), recipe.decontamination.ngram_chars
    texts = {name: list(held_out(manifest, name)) for name in manifest.sources}
    hashes = [ngram_hashes(text, ngram_chars) for found in texts.values() for text, _ in found]
    index = np.unique(np.concatenate(hashes))
    whole = {text for found in texts.values() for text, _ in found}  # of texts shorter than an n-gram
    lines = {name: [{"text": text, "split": split} for text, split in found] for name, found in texts.items()}
    shared: Counter[str] = Counter()
    for name, text in raw_documents(recipe, folder):
        if text in whole or shares_ngram(ngram_hashes(text, ngram_chars), index):
            shared[name] += 1
        else:
            lines[name].append({"text": text, "split": "train"})
    for name, rows in lines.items():
        with atomic_path(folder / f"{name}.jsonl") as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        print(f"{name}: {len(rows) - len(texts[name]):,} training documents, {shared[name]:,} left out", flush=True)


if __name__ == "__main__":
    defaults = [Path(__file__).with_name("packages.json"), Path("data/zh_raw_texts")]
    given = [Path(argument) for argument in sys.argv[1:]]
    recipe_file, out = given + defaults[len(given) :]
    main(load_recipe(recipe_file), out)
