"""How many planted copies and planted personal data the pipeline finds, in news.

Copies: of 500 documents each, at a Jaccard similarity of 5-character n-grams of about 0.9 and 0.8, either one block or
scattered characters replaced by those of other documents. A pair is found if not both are kept. Precision: the removed
documents whose kept document has a true similarity of at least 0.5, among all near duplicates, planted or not.

    python scripts/benchmarks/corpus_planted.py
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from record import Recorder

from m6.corpus.plan import make_plan
from m6.corpus.recipe import CorpusRecipe, FilterSettings
from m6.corpus.rules import compared_form, mask_personal_data, stored_form, without_marks
from m6.corpus.selection import NEAR
from m6.corpus.stages import run_task
from m6.corpus.work import prepare, read_documents, work_folder
from m6.data.sources import SourceOptions, find_source
from m6.files import cache_folder
from m6.validation import validate

SIMILARITIES, WAYS, PAIRS, SEEDS = (0.9, 0.8), ("block", "scatter"), 500, (0, 1, 2)
LEAST_CHARS = 300
NGRAM = 5
BESIDE = re.compile(r"[\x21-\x7e\d]")


def letters_of(text: str) -> str:
    return without_marks(compared_form(text))


def jaccard(first: str, second: str) -> float:
    a, b = ({text[begin : begin + NGRAM] for begin in range(len(text) - NGRAM + 1)} for text in (first, second))
    return len(a & b) / max(len(a | b), 1)


def altered(text: str, other: str, similarity: float, way: str, rng: random.Random) -> str:
    """The letters of a text, changed until the similarity has just fallen to ``similarity``."""
    begin = rng.randrange(len(text) // 2)
    places = (
        list(range(begin, len(text))) + list(range(begin))
        if way == "block"
        else rng.sample(range(len(text)), len(text))
    )
    least, most = 0, len(text)

    def changed(count: int) -> str:
        characters = list(text)
        for place in places[:count]:
            characters[place] = other[place % len(other)]
        return "".join(characters)

    while least < most:  # the fewest changes that suffice
        middle = (least + most) // 2
        if jaccard(text, changed(middle)) <= similarity:
            most = middle
        else:
            least = middle + 1
    return changed(least)


def plant(documents: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields names and texts: all documents, and the copies of some."""
    for number, text in enumerate(documents):
        yield f"o{number}", text
    for index, (similarity, way) in enumerate((s, w) for s in SIMILARITIES for w in WAYS):
        for number in range(index * PAIRS, (index + 1) * PAIRS):
            other = letters_of(documents[rng.randrange(len(documents))])
            yield f"c{number}", altered(letters_of(documents[number]), other, similarity, way, rng)


def copies(documents: list[str], seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    rng.shuffle(documents)
    planted = list(plant(documents, rng))
    rng.shuffle(planted)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in range(4):
            lines = [json.dumps({"text": text, "name": name}, ensure_ascii=False) for name, text in planted[part::4]]
            (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        names = {
            f"web/{part}.jsonl:{line}/0": name
            for part in range(4)
            for line, (name, _) in enumerate(planted[part::4], start=1)
        }
        lax = {key: 1 for key in FilterSettings.model_fields if key.startswith("max_")}
        recipe = validate(
            CorpusRecipe,
            {
                "out": str(folder / "data"),
                "inputs": [{"source": str(folder), "name": "web", "licence": "MIT"}],
                "filters": {"min_chars": 0, "min_chinese_share": 0, **lax},
                "remove_boilerplate": False,
            },
            "",
        )
        work = prepare(work_folder(folder / "data"), make_plan(recipe))
        for stage in ("clean", "pairs", "select"):
            run_task(work.folder, stage, 0, 1)
        rows = [list(read_documents(work.documents(part))) for part in range(4)]
        removed, similar = set(), []
        for part in range(4):
            decisions = np.load(work.decisions(part))
            for number, status in enumerate(decisions["status"]):
                if status:
                    removed.add(names[rows[part][number].id])
                if status == NEAR:
                    kept = rows[int(decisions["kept_part"][number])][int(decisions["kept_row"][number])]
                    similar.append(jaccard(letters_of(rows[part][number].text), letters_of(kept.text)))
    found: dict[str, float] = {}
    for index, (similarity, way) in enumerate((s, w) for s in SIMILARITIES for w in WAYS):
        numbers = range(index * PAIRS, (index + 1) * PAIRS)
        hits = sum(1 for number in numbers if {f"o{number}", f"c{number}"} & removed)
        found[f"recall at {similarity}, {way}"] = hits / PAIRS
    for least in (0.5, 0.6, 0.7):
        found[f"precision: similarity to the kept one >= {least}"] = sum(each >= least for each in similar) / len(
            similar
        )
    return found


def digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choices("0123456789", k=count))


def mobile(rng: random.Random, mark: str = "") -> str:
    return f"1{rng.choice('3456789')}{digits(rng, 1)}{mark}{digits(rng, 4)}{mark}{digits(rng, 4)}"


def identity_number(rng: random.Random) -> str:
    birth = f"{rng.randint(1940, 2012)}{rng.randint(1, 12):02d}{rng.randint(1, 28):02d}"
    body = f"{rng.choice('123456')}{digits(rng, 5)}{birth}{digits(rng, 3)}"
    total = sum(int(digit) * 2 ** (17 - place) for place, digit in enumerate(body))
    return body + "0123456789X"[(1 - total) % 11]


def of_a_place(rng: random.Random, form: str) -> str:
    return form.format(rng.choice(["010", "021", "0755", "0571"])) + f"{rng.randint(2, 8)}{digits(rng, 7)}"


WIDE = {ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789"}
PERSONAL: dict[str, Callable[[random.Random], str]] = {
    "mobile number": mobile,
    "mobile number in groups": lambda rng: mobile(rng, rng.choice(" -")),
    "mobile number with +86": lambda rng: f"+86{rng.choice(['', ' ', '-'])}{mobile(rng)}",
    "mobile number in full width": lambda rng: mobile(rng).translate(WIDE),
    "telephone of a place": lambda rng: of_a_place(rng, "{}-"),
    "telephone in brackets": lambda rng: of_a_place(rng, "（{}）"),
    "identity number": identity_number,
    "e-mail address": lambda rng: f"{rng.choice(['wang', 'li.na', 'z_3'])}@{rng.choice(['qq.com', 'mail.pku.edu.cn'])}",
    "IPv4 address": lambda rng: ".".join(str(rng.randint(1, 255)) for _ in range(4)),
    "IPv6 address": lambda rng: ":".join(f"{rng.randrange(1, 1 << 16):x}" for _ in range(8)),
}


def personal(documents: list[str], seed: int) -> dict[str, float]:
    """The share of each kind that is gone from a text after it was put between two of its characters."""
    rng = random.Random(seed)
    found = {}
    for kind, make in PERSONAL.items():
        hits = 0
        for _ in range(PAIRS):
            value, places = make(rng), list[int]()
            while not places:  # in running text: not inside of a number or a foreign word
                text = rng.choice(documents)
                places = [place for place in range(1, len(text)) if not BESIDE.search(text[place - 1 : place + 1])]
            place = rng.choice(places)
            masked, _ = mask_personal_data(stored_form(text[:place] + value + text[place:], to_simplified=False))
            hits += stored_form(value, to_simplified=False) not in masked
        found[f"personal data: {kind}"] = hits / PAIRS
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    recorder = Recorder("corpus_planted", "Planted copies and personal data")
    options = SourceOptions(cache=cache_folder(), passage_chars=100_000)
    texts = dict.fromkeys(row.text for row in find_source("inews", options).rows())
    documents = [text for text in texts if len(letters_of(text)) >= LEAST_CHARS]
    measured: list[dict[str, Any]] = [copies(list(documents), seed) | personal(documents, seed) for seed in SEEDS]
    rows = []
    for name in measured[0]:
        values = [each[name] for each in measured]
        rows.append([name, f"{np.mean(values):.3f}", f"{min(values):.3f} to {max(values):.3f}"])
    notes = (
        f"{len(documents):,} documents of inews with at least {LEAST_CHARS} letters; {PAIRS} copies and personal data "
        f"of each kind; seeds {SEEDS}."
    )
    recorder.write(["measure", "mean", "range"], rows, notes, {"seeds": list(SEEDS), "measured": measured})


if __name__ == "__main__":
    main()
