"""How many altered copies of photographs the pipeline finds, and which drawings it takes for each other.

For each alteration and seed: a corpus of all photographs and an altered copy of each, whose captions differ. A copy is
found if not both are kept. Precision: the removed pictures whose kept picture shows the same photograph, over all
alterations. Beside it, what a perceptual hash of 64 bits (phash, at most 8 bits different) finds. Drawings: the share
of pictures that are removed as near duplicates from sources of different drawings, and from squares cut out of
backgrounds side by side.

    python scripts/benchmarks/corpus_planted_pictures.py
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from photographs import ALTERATIONS, backgrounds, jpeg, photographs
from PIL import Image
from record import Recorder

from m6.corpus.picture_copies import PictureWriter, picture_pairs, write_picture_pairs
from m6.corpus.plan import make_plan
from m6.corpus.recipe import CorpusRecipe
from m6.corpus.selection import KEPT
from m6.corpus.stages import run_task
from m6.corpus.work import prepare, read_documents, work_folder
from m6.data.sources import SourceOptions, find_source
from m6.data.sources.pictures import decode, on_white
from m6.files import cache_folder
from m6.validation import validate

SEEDS = (0, 1, 2)
DRAWINGS = {"shapes": 5000, "easy_vqa": 5000, "icon_park": 4000, "emoji": 4000}
TILE = 250  # pixels, of backgrounds of at most 2000
PHASH_BITS = 8


def phash(picture: Image.Image) -> int:
    """The perceptual hash of 64 bits of the package imagehash: signs of 8 x 8 frequencies against their median."""
    from scipy.fft import dct

    grey = np.asarray(picture.convert("L").resize((32, 32), Image.Resampling.LANCZOS), dtype=np.float64)
    low = dct(dct(grey, axis=0), axis=1)[:8, :8]
    return int("".join("01"[value] for value in (low > np.median(low)).ravel().astype(int)), 2)


def found_copies(originals: dict[str, bytes], copies: dict[str, bytes], folder: Path) -> tuple[set[str], int, int]:
    """Builds the corpus; returns the names of found copies, removed pictures, and those removed rightly."""
    folder.mkdir()
    rows = [
        *((f"o/{name}", data) for name, data in originals.items()),
        *((f"c/{name}", data) for name, data in copies.items()),
    ]
    (folder / "web").mkdir()
    for kind, name, data in ((key[0], key[2:], data) for key, data in rows):
        (folder / "web" / f"{kind}-{name}.jpg").write_bytes(data)
        (folder / "web" / f"{kind}-{name}.txt").write_text(f"标题{kind}{name}", encoding="utf-8")
    recipe = {
        "out": str(folder / "data"),
        "inputs": [{"source": str(folder / "web"), "name": "web", "licence": "private"}],
        "picture_filters": {"min_side": 1, "max_aspect": 100, "min_contrast": 0, "min_chinese_share": 0},
    }
    work = prepare(work_folder(folder / "data"), make_plan(validate(CorpusRecipe, recipe, "")))
    for stage in ("clean", "pairs", "select"):
        run_task(work.folder, stage, 0, 1)
    names = [row.id.rpartition("/")[2].removesuffix(".jpg") for row in read_documents(work.documents(0))]
    assert len(names) == len(rows)
    decisions = np.load(work.decisions(0))
    removed = [
        (names[number], names[decisions["kept_row"][number]]) for number in np.flatnonzero(decisions["status"] != KEPT)
    ]
    kept = set(names) - {name for name, _ in removed}
    found = {name for name in originals if not {f"o-{name}", f"c-{name}"} <= kept}
    return found, len(removed), sum(first[2:] == second[2:] for first, second in removed)


def planted(originals: dict[str, Image.Image], seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    files = {name: jpeg(picture, 92) for name, picture in originals.items()}
    hashes = {name: phash(picture) for name, picture in originals.items()}
    found: dict[str, float] = {}
    removed = right = hits = 0
    for alteration, alter in ALTERATIONS.items():
        copies = {name: alter(picture, rng) for name, picture in originals.items()}
        with tempfile.TemporaryDirectory() as folder:
            names, gone, own = found_copies(files, copies, Path(folder) / "corpus")
        removed, right = removed + gone, right + own
        near = [(hashes[name] ^ phash(Image.open(io.BytesIO(data)))).bit_count() for name, data in copies.items()]
        found[f"recall: {alteration}"] = len(names) / len(originals)
        found[f"phash: {alteration}"] = sum(each <= PHASH_BITS for each in near) / len(near)
    values = list(hashes.values())
    for place, value in enumerate(values):
        others = values[:place] + values[place + 1 :]
        hits += any((value ^ other).bit_count() <= PHASH_BITS for other in others)
    found["precision"] = right / removed
    found["removed"] = removed
    found["phash: different photographs"] = hits / len(values)
    return found


def tiles(cache: Path) -> Iterator[Image.Image]:
    for data in backgrounds(cache):
        with Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (2000, 2000))
            picture = image.convert("RGB")
        picture.thumbnail((2000, 2000), Image.Resampling.LANCZOS)
        for y, x in itertools.product(range(0, picture.height - TILE, TILE), range(0, picture.width - TILE, TILE)):
            yield picture.crop((x, y, x + TILE, y + TILE))


def taken_for_copies(pictures: Iterator[Image.Image]) -> tuple[int, float, float]:
    """Number of pictures that are not blank, and the shares removed as near duplicates: by the pipeline, by phash."""
    hashes, seen, count = [], set(), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with PictureWriter(folder, 0) as writer:
            for picture in pictures:
                pixels = picture.tobytes()
                if pixels in seen or np.asarray(picture).std(axis=(0, 1)).max() < 4:
                    continue
                seen.add(pixels)
                count += 1
                hashes.append(phash(picture))
                writer.write(picture)
        write_picture_pairs(folder, 1, 0, 1)
        pairs = picture_pairs(folder, 1)
    removed = len(set(pairs[:, 3].tolist()))  # the later picture of each pair
    values = np.array(hashes, dtype=np.uint64)
    again = sum(
        bool((np.bitwise_count(values[:place] ^ values[place]) <= PHASH_BITS).any()) for place in range(1, len(values))
    )
    return count, removed / count, again / count


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    recorder = Recorder("corpus_planted_pictures", "Planted copies of pictures")
    cache = cache_folder()
    originals = dict(photographs(cache))
    measured: list[dict[str, float]] = [planted(originals, seed) for seed in SEEDS]
    rows = []
    for alteration in ALTERATIONS:
        ours, theirs = ([each[f"{kind}: {alteration}"] for each in measured] for kind in ("recall", "phash"))
        rows.append([f"recall: {alteration}", *_columns(ours), *_columns(theirs)])
    rows.append(["precision", *_columns([each["precision"] for each in measured]), "", ""])
    different = [each["phash: different photographs"] for each in measured]
    rows.append(["photographs with another one beside them", "", "", *_columns(different)])
    drawings: dict[str, Any] = {}
    options = SourceOptions(cache=cache)

    def pictures_of(name: str, count: int) -> Iterator[Image.Image]:
        for row in itertools.islice(find_source(name, options).rows(), count):
            assert row.image is not None
            yield on_white(decode(row.image, 128).picture)

    sources = {name: pictures_of(name, count) for name, count in DRAWINGS.items()} | {
        "squares of backgrounds": tiles(cache)
    }
    for name, pictures in sources.items():
        count, ours_share, theirs_share = taken_for_copies(pictures)
        drawings[name] = {"pictures": count, "removed": ours_share, "phash": theirs_share}
        rows.append([f"taken for copies: {count:,} of {name}", f"{ours_share:.4f}", "", f"{theirs_share:.4f}", ""])
    notes = (
        f"{len(originals)} photographs and some paintings, of gcompris-qt-data and four packages of backgrounds of "
        f"Debian, at most 1024 pixels a side; seeds {SEEDS}. A crop shortens both sides and lies anywhere. Of "
        f"{sum(each['removed'] for each in measured):,.0f} removed pictures the kept one was looked up. Emoji come "
        "in five styles, of which two share flags and people: many of those pairs do look the same. Squares lie "
        "side by side in textures and skies."
    )
    numbers = {"seeds": list(SEEDS), "measured": measured, "drawings": drawings}
    recorder.write(["measure", "m6 data corpus", "range", "phash, 64 bits", "range"], rows, notes, numbers)


def _columns(values: list[float]) -> tuple[str, str]:
    return f"{np.mean(values):.3f}", f"{min(values):.3f} to {max(values):.3f}"


if __name__ == "__main__":
    main()
