"""Reads 50 million rows in 2,000 shards: start, memory, throughput from a cold cache, and the same data on any ranks.

The rows are short texts, made from a bank of phrases. Each measurement is a process of its own, before which the shards
are dropped from the page cache. The peers read random rows, what a plain shuffle of all rows asks: with the same
reader, and from memory-mapped Arrow files, to which Hugging Face Datasets copies the shards first.

    python scripts/benchmarks/reader.py                     (makes 15 GB in runs/reader first; remove them afterwards)
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from record import ROOT, Recorder, spread

from m6 import files
from m6.data.manifest import Manifest, Origin, Shard, SourceEntry, SplitEntry
from m6.data.objectives import ObjectivesSettings
from m6.data.order import Mixture, permuted
from m6.data.pretraining import PretrainingData
from m6.data.reader import SCHEMA, open_split
from m6.data.settings import DataSettings

SHARDS, SHARD_ROWS, GROUP_ROWS = 2000, 25_000, 6250
SAMPLES_PER_STEP, MICRO_BATCH = 512, 32
ROUNDS, RANDOM_ROWS, ORDERED_ROWS = 3, 2000, 1_200_000
FIRST_STEP, STEPS = 40_000, 6  # resumed in the middle of the first epoch


def make_shards(folder: Path) -> Manifest:
    rng = np.random.default_rng(0)
    han = np.array([chr(code) for code in range(0x4E00, 0x4E00 + 3000)])
    phrases = np.array(["".join(rng.choice(han, rng.integers(6, 14))) for _ in range(4096)])
    shards = []
    for number in range(SHARDS):
        path = folder / "train" / f"texts-{number:05d}.parquet"
        chosen = phrases[rng.integers(len(phrases), size=(5, SHARD_ROWS))]
        texts = pa.array(["，".join(row) for row in chosen.T])
        ids = pa.array([f"texts/{number * SHARD_ROWS + row}" for row in range(SHARD_ROWS)])
        values = {"id": ids, "text": texts, "group": ids, "source": pa.array(["texts"] * SHARD_ROWS)}
        columns = [values.get(field.name, pa.nulls(SHARD_ROWS, field.type)) for field in SCHEMA]
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.Table.from_arrays(columns, schema=SCHEMA),
            path,
            row_group_size=GROUP_ROWS,
            compression="zstd",
            write_page_checksum=True,
        )
        groups = [GROUP_ROWS] * (SHARD_ROWS // GROUP_ROWS)
        size, sha256 = path.stat().st_size, files.sha256(path)
        shards.append(Shard(file=f"train/{path.name}", rows=SHARD_ROWS, bytes=size, sha256=sha256, row_groups=groups))
    origin = [Origin(package="benchmark", version="1", licence="Apache-2.0")]
    splits = {"train": SplitEntry.of(shards)}
    manifest = Manifest(sources={"texts": SourceEntry(kind="text", licence="Apache-2.0", origin=origin, splits=splits)})
    manifest.save(folder)
    return manifest


def drop_from_page_cache(folder: Path) -> None:
    for path in [*(folder / "train").iterdir(), *(folder / "arrow").rglob("*.arrow")]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what ``work`` returns in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def resident_mib() -> float:
    """Resident memory of this process, without the files that it shares with others (libraries)."""
    with open("/proc/self/status") as file:
        [line] = (line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def read_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file.read().splitlines())["read_bytes"])


def mixture_of(folder: Path) -> tuple[Manifest, Mixture]:
    manifest = Manifest.load(folder)
    blocks = open_rows(manifest).block_sizes
    return manifest, Mixture({("language_modelling", "texts"): 1.0}, {"texts": blocks}, 0, SAMPLES_PER_STEP)


def open_rows(manifest: Manifest) -> Any:
    return open_split(manifest, "texts", "train", ["id", "text", "question", "answer", "context", "image"])


def start(folder: Path, tokenizer: Path) -> dict[str, float]:
    before = resident_mib()
    begin = time.perf_counter()
    data = open_data(folder, tokenizer)
    data.check_files()
    data.micro_batch(FIRST_STEP * SAMPLES_PER_STEP // MICRO_BATCH)
    return {"start_s": time.perf_counter() - begin, "imports_mib": before, "resident_mib": resident_mib()}


def open_data(folder: Path, tokenizer: Path) -> PretrainingData:
    silent = {name: {"weight": 0} for name in ("text_denoising", "image_captioning", "image_text_denoising")}
    return PretrainingData(
        DataSettings(path=folder, tokenizer=tokenizer, sequence_length=96),
        ObjectivesSettings.model_validate(silent),
        seed=0,
        micro_batch_size=MICRO_BATCH,
        samples_per_step=SAMPLES_PER_STEP,
        image_size=32,
        patch_size=16,
    )


def throughput(folder: Path, in_order: bool, number: int, rounds: int) -> dict[str, float]:
    """Rows a second of one process. ``rounds`` begins at another place each time."""
    manifest, mixture = mixture_of(folder)
    rows = open_rows(manifest)
    first, before = rounds * 10**7, read_bytes()
    begin, cpu = time.perf_counter(), time.process_time()
    for sample in range(first, first + number):
        rows[mixture.row(mixture.draw(sample)) if in_order else permuted(sample, len(rows), key=0)]
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    return {
        "rows_per_s": number / seconds,
        "rows_per_cpu_s": number / cpu_seconds,
        "bytes_per_row": (read_bytes() - before) / number,
        "resident_mib": resident_mib(),
    }


def throughput_of_arrow(folder: Path, number: int, rounds: int) -> dict[str, float]:
    """Random rows of memory-mapped Arrow files, which Hugging Face Datasets copies the shards to."""
    begin, before = time.perf_counter(), read_bytes()
    rows = arrow_rows(folder)
    open_s, open_bytes = time.perf_counter() - begin, read_bytes() - before
    first, before = rounds * 10**7, read_bytes()
    begin, cpu = time.perf_counter(), time.process_time()
    for sample in range(first, first + number):
        rows[permuted(sample, len(rows), key=0)]
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    return {
        "rows_per_s": number / seconds,
        "rows_per_cpu_s": number / cpu_seconds,
        "bytes_per_row": (read_bytes() - before) / number,
        "resident_mib": resident_mib(),
        "open_s": open_s,
        "open_gb": open_bytes / 1e9,
    }


def arrow_rows(folder: Path) -> datasets.Dataset:
    datasets.disable_progress_bars()
    paths = sorted(map(str, (folder / "train").iterdir()))
    rows = datasets.Dataset.from_parquet(paths, cache_dir=str(folder / "arrow"))
    return rows.select_columns(["id", "text", "question", "answer", "context", "image"])


def copy_to_arrow(folder: Path) -> None:
    arrow_rows(folder)


def digests_of_rank(folder: Path, tokenizer: Path, rank: int, world: int) -> dict[str, Any]:
    """The SHA-256 of each micro-batch of one rank, in the loop's order, and what the rank read."""
    data = open_data(folder, tokenizer)
    own = SAMPLES_PER_STEP // MICRO_BATCH // world
    digests, before = {}, read_bytes()
    for step in range(FIRST_STEP, FIRST_STEP + STEPS):
        for micro_batch in range(own):
            index = (step * world + rank) * own + micro_batch
            tensors = data.micro_batch(index).tensors()
            digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))
            digests[index] = digest.hexdigest()
    return {"digests": digests, "bytes": read_bytes() - before, "resident_mib": resident_mib()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "reader")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "data" / "real" / "tokenizer")
    arguments = parser.parse_args()
    folder, tokenizer = arguments.folder, arguments.tokenizer
    recorder = Recorder("reader", "Reading 50 million rows in 2,000 shards")
    if not (folder / "manifest.json").exists():
        make_shards(folder)
    size = Manifest.load(folder).split("texts", "train").bytes

    begin = time.perf_counter()
    in_process(copy_to_arrow, folder)
    conversion_s = time.perf_counter() - begin
    starts, ordered, random_rows, random_arrow = [], [], [], []
    for number in range(ROUNDS):
        drop_from_page_cache(folder)
        starts.append(in_process(start, folder, tokenizer))
        drop_from_page_cache(folder)
        ordered.append(in_process(throughput, folder, True, ORDERED_ROWS, number))
        drop_from_page_cache(folder)
        random_rows.append(in_process(throughput, folder, False, RANDOM_ROWS, number))

        drop_from_page_cache(folder)
        random_arrow.append(in_process(throughput_of_arrow, folder, RANDOM_ROWS, number))

    ranks: dict[int, list[dict[str, Any]]] = {}
    for world in (1, 2, 4):
        ranks[world] = []
        for rank in range(world):
            drop_from_page_cache(folder)
            ranks[world].append(in_process(digests_of_rank, folder, tokenizer, rank, world))
    merged = {w: {k: v for rank in results for k, v in rank["digests"].items()} for w, results in ranks.items()}
    same = all(merged[world] == merged[1] for world in ranks)
    assert same, "ranks read different data"

    def of(results: list[dict[str, float]], name: str, form: str) -> str:
        return spread([each[name] for each in results], form)

    def all_of(name: str) -> list[str]:
        return [of(results, name, ",.0f") for results in (ordered, random_rows, random_arrow)]

    speed_up = [
        [a["rows_per_s"] / b["rows_per_s"] for a, b in zip(ordered, peer, strict=True)]
        for peer in (random_rows, random_arrow)
    ]
    rows = [
        [
            "start, seconds: manifest, sizes of all shards, first micro-batch; of Arrow files: opening them",
            of(starts, "start_s", ".2f"),
            "",
            of(random_arrow, "open_s", ".1f"),
        ],
        ["GB read by opening", "", "", of(random_arrow, "open_gb", ".1f")],
        ["rows a second, one process, cold cache", *all_of("rows_per_s")],
        ["rows a CPU second", *all_of("rows_per_cpu_s")],
        ["bytes from the disk for a row", *all_of("bytes_per_row")],
        ["in order against it, rows a second", "", *(spread(ratios, ".1f") for ratios in speed_up)],
        ["resident memory at the end without shared libraries, MiB", *all_of("resident_mib")],
    ]
    for world, results in ranks.items():
        read = max(result["bytes"] for result in results) / 2**20
        name = f"{world} ranks: MiB that a rank reads for {STEPS} steps from a cold cache (the fullest)"
        rows.append([name, f"{read:,.0f}", "", ""])
    notes = (
        f"{SHARDS:,} shards of {SHARD_ROWS:,} rows, {size / 1e9:.1f} GB, row groups of {GROUP_ROWS:,} rows; "
        f"{SAMPLES_PER_STEP} samples a step. Median and 10th to 90th percentile of {ROUNDS} rounds, each in a fresh "
        "process after the shards were dropped from the page cache. In order: "
        f"{ORDERED_ROWS:,} rows from another place in each round; random: {RANDOM_ROWS:,} rows. The micro-batches of "
        f"steps {FIRST_STEP:,} to {FIRST_STEP + STEPS - 1:,}, which a run reads that resumes there, have the same "
        "SHA-256 on 1, 2 and 4 ranks. Of the memory, imports take "
        f"{starts[0]['imports_mib']:,.0f} MiB. The copy to Arrow files took {conversion_s:,.0f} s "
        "(0: it was there). Opening them reads all of them; how much of it is still in the page cache decides their "
        "rate."
    )
    numbers = {
        "starts": starts,
        "in_order": ordered,
        "random": random_rows,
        "random_arrow": random_arrow,
        "arrow_conversion_s": conversion_s,
        "same_on_1_2_4_ranks": same,
    }
    recorder.write(["measure", "in order", "random rows", "random rows of Arrow files"], rows, notes, numbers)


if __name__ == "__main__":
    main()
