"""What pictures cost in the corpus pipeline beside img2dataset's resizer, on the same files in one interleaved run.

img2dataset's resizer decodes with OpenCV, resizes (area) and pads to a square of 256 pixels, and stores JPEG of quality
95. It needs an environment of its own (Python below 3.13): its Python is given, and runs its own code on files in
memory. Ours: the same step (decode, shrink, pad, encode), and all stages of m6 data corpus on WebDataset tars of the
files, which also filter, find copies, split and make checksums. CPU seconds of one process.

    python -m venv /tmp/img2dataset && /tmp/img2dataset/bin/pip install img2dataset
    python scripts/benchmarks/corpus_picture_speed.py --img2dataset /tmp/img2dataset/bin/python
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from photographs import backgrounds, jpeg, photographs
from PIL import Image
from record import Recorder, spread

from m6.corpus.plan import make_plan
from m6.corpus.recipe import CorpusRecipe
from m6.corpus.stages import STAGES, run_task
from m6.corpus.work import prepare, work_folder
from m6.data.sources.pictures import encode
from m6.files import cache_folder
from m6.validation import validate

SIZE = 256
TARS = 4
WEB_SIDE = 480  # pixels: so that a picture has about 31 kB
TERABYTES, PICTURES = 1.9, 60.5e6  # of pictures in M6-Corpus
# Prints the CPU seconds of its resizer for the files of a folder.
PEER = f"""
import io, sys, time
from pathlib import Path
from img2dataset.resizer import Resizer
files = [path.read_bytes() for path in sorted(Path(sys.argv[1]).iterdir())]
resizer = Resizer({SIZE}, "border", False)
resizer(io.BytesIO(files[0]))
begin = time.process_time()
for data in files:
    result = resizer(io.BytesIO(data))
    assert result[5] is None, result
print(time.process_time() - begin)
"""


def resized(files: list[bytes]) -> float:
    begin = time.process_time()
    for data in files:
        encode(data, SIZE)
    return time.process_time() - begin


def piped(files: list[bytes], folder: Path) -> dict[str, float]:
    """CPU seconds of each stage."""
    (folder / "web").mkdir(parents=True)
    for number in range(TARS):
        with tarfile.open(folder / "web" / f"{number}.tar", "w") as tar:
            for index in range(number, len(files), TARS):
                for suffix, content in (("jpg", files[index]), ("txt", f"第{index}张图片".encode())):
                    member = tarfile.TarInfo(f"{index:05d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    recipe = {
        "out": str(folder / "data"),
        "inputs": [{"source": str(folder / "web"), "name": "web", "licence": "private"}],
        "image_size": SIZE,
    }
    work = prepare(work_folder(folder / "data"), make_plan(validate(CorpusRecipe, recipe, "")))
    found = {}
    for stage in STAGES:
        begin = time.process_time()
        run_task(work.folder, stage.name, 0, 1)
        found[stage.name] = time.process_time() - begin
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--img2dataset", required=True, help="a Python that has img2dataset")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    recorder = Recorder("corpus_picture_speed", "Cost of pictures in the corpus pipeline")
    web = []
    for _, picture in photographs(cache_folder()):
        picture.thumbnail((WEB_SIDE, WEB_SIDE), Image.Resampling.LANCZOS)
        web.append(jpeg(picture))
    sets = {"pictures of web pages": web, "backgrounds": list(backgrounds(cache_folder()))}
    rows: list[list[str]] = []
    numbers: dict[str, Any] = {}
    rates: dict[str, list[float]] = {}
    for title, files in sets.items():
        measured: dict[str, list[float]] = {"img2dataset, resizer": [], "m6, resize and encode": []}
        measured |= {f"m6 data corpus, {stage.name}": [] for stage in STAGES} | {"m6 data corpus": []}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "files").mkdir()
            for index, data in enumerate(files):
                (folder / "files" / f"{index:05d}.jpg").write_bytes(data)
            for number in range(chosen.rounds + 1):
                command = [chosen.img2dataset, "-W", "ignore", "-c", PEER, str(folder / "files")]
                peer = subprocess.run(command, capture_output=True, text=True, check=True)
                own, stages = resized(files), piped(files, folder / str(number))
                if number:  # the first round imports and compiles
                    measured["img2dataset, resizer"].append(float(peer.stdout))
                    measured["m6, resize and encode"].append(own)
                    for stage, stage_s in stages.items():
                        measured[f"m6 data corpus, {stage}"].append(stage_s)
                    measured["m6 data corpus"].append(sum(stages.values()))
        for contestant, seconds in measured.items():
            rates[contestant] = [len(files) / each for each in seconds]
            rate = "" if ", " in contestant and "corpus" in contestant else spread(rates[contestant], ".1f")
            rows.append([title, contestant, spread(seconds, ".3f"), rate])
        numbers[title] = {"pictures": len(files), "bytes": sum(map(len, files)), "seconds": measured}
        if title == "pictures of web pages":
            hours = PICTURES / float(np.median(rates["m6 data corpus"])) / 3600
            peer_hours = PICTURES / float(np.median(rates["img2dataset, resizer"])) / 3600
    described = "; ".join(
        f"{each['pictures']} {title} of {each['bytes'] / each['pictures'] / 1000:,.0f} kB on average"
        for title, each in numbers.items()
    )
    notes = (
        f"{described}. Median of {chosen.rounds} rounds after one that does not count, 10th to 90th percentile. "
        f"Extrapolated at the rate of pictures of web pages, {PICTURES / 1e6} million pictures, {TERABYTES} TB, take "
        f"{hours:.0f} core-hours in all stages (nothing of that size has run), and {peer_hours:.0f} in "
        "img2dataset's resizer alone."
    )
    recorder.write(["files", "step", "CPU seconds", "pictures a CPU second"], rows, notes, numbers)


if __name__ == "__main__":
    main()
