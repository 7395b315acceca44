"""What the corpus pipeline costs beside datatrove's own blocks alone, on the same news in one interleaved run.

Copies alone: datatrove's JSONL reader, MinHash over characters with the settings of the recipe, buckets, clusters,
filter and Parquet writer. With its filters: before these also its Gopher repetition filter, over characters too, and
its formatter of personal data. Ours: all stages of m6 data corpus, which normalise, filter, mask, find copies,
decontaminate, cut to passages, split and make checksums. CPU seconds of one process.

    python scripts/benchmarks/corpus_speed.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from record import Recorder, spread

from m6.corpus.plan import make_plan
from m6.corpus.recipe import CorpusRecipe, NearDuplicateSettings
from m6.corpus.stages import STAGES, run_task
from m6.corpus.work import prepare, work_folder
from m6.data.sources import SourceOptions, find_source
from m6.files import cache_folder
from m6.validation import validate

FILES = 4
GIGABYTES = 292  # of text in M6-Corpus


def seconds(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def ours(texts: Path, out: Path) -> dict[str, float]:
    recipe = {"out": str(out), "inputs": [{"source": str(texts), "name": "web", "licence": "MIT"}]}
    work = prepare(work_folder(out), make_plan(validate(CorpusRecipe, recipe, "")))
    return {stage.name: seconds(functools.partial(run_task, work.folder, stage.name, 0, 1)) for stage in STAGES}


def datatrove(texts: Path, out: Path, with_filters: bool) -> dict[str, float]:
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.filters import GopherRepetitionFilter
    from datatrove.pipeline.formatters import PIIFormatter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import ParquetWriter
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Characters(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return list(text.replace(" ", ""))

        sent_tokenize = span_tokenize = word_tokenize

    same = NearDuplicateSettings()
    config = MinhashConfig(same.ngram_chars, same.num_buckets, same.hashes_per_bucket)
    reader = JsonlReader(str(texts))

    def filtered() -> None:
        # Lenient, so that the stages after it have the same documents in all contestants.
        lax = {"top_n_grams": ((2, 1.0), (3, 1.0), (4, 1.0)), "dup_n_grams": tuple((n, 1.0) for n in range(5, 11))}
        for rank in range(FILES):
            rows = reader.run(rank=rank, world_size=FILES)
            for step in (GopherRepetitionFilter(language=Characters(), **lax), PIIFormatter()):
                rows = step.run(rows, rank)
            for _ in ParquetWriter(str(out / "filtered")).run(rows, rank):
                pass

    def signatures() -> None:
        for rank in range(FILES):
            step = MinhashDedupSignature(str(out / "signatures"), config, Characters())
            step.run(reader.run(rank=rank, world_size=FILES), rank)

    def buckets() -> None:
        for rank in range(same.num_buckets):
            step = MinhashDedupBuckets(str(out / "signatures"), str(out / "buckets"), config=config)
            step.run(rank=rank, world_size=same.num_buckets)

    def clusters() -> None:
        MinhashDedupCluster(str(out / "buckets"), str(out / "clusters"), config).run()

    def written() -> None:
        for rank in range(FILES):
            rows = MinhashDedupFilter(str(out / "clusters")).run(reader.run(rank=rank, world_size=FILES), rank)
            for _ in ParquetWriter(str(out / "parquet")).run(rows, rank):
                pass

    parts = {"filter": filtered} if with_filters else {}
    parts |= {"signatures": signatures, "buckets": buckets, "clusters": clusters, "write": written}
    return {name: seconds(part) for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=3000)
    chosen = parser.parse_args()
    from loguru import logger

    logger.disable("datatrove")
    recorder = Recorder("corpus_speed", "Cost of the corpus pipeline")
    options = SourceOptions(cache=cache_folder(), passage_chars=100_000)
    texts = [row.text for row in find_source("inews", options).rows()][: chosen.documents]
    contestants: dict[str, Callable[[Path, Path], dict[str, float]]] = {
        "datatrove, copies alone": functools.partial(datatrove, with_filters=False),
        "datatrove, with its filters": functools.partial(datatrove, with_filters=True),
        "m6 data corpus": ours,
    }
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        for file in range(FILES):
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts[file::FILES])
            (folder / "texts" / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
        size = sum(file.stat().st_size for file in (folder / "texts").iterdir())
        for number in range(chosen.rounds + 1):
            for contestant, run in contestants.items():
                with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                    found = run(folder / "texts", folder / f"{contestant}{number}")
                if number:  # the first round imports and compiles
                    measured[contestant].append(found)
    rows, totals = [], {}
    for contestant, rounds in measured.items():
        totals[contestant] = [sum(each.values()) for each in rounds]
        for stage in rounds[0]:
            rows.append([contestant, stage, spread([each[stage] for each in rounds], ".2f"), ""])
        rates = [size / 1e6 / total for total in totals[contestant]]
        rows.append([contestant, "all", spread(totals[contestant], ".2f"), spread(rates, ".2f")])
    *peers, own = totals.values()
    ratios = [spread([mine / theirs for mine, theirs in zip(own, peer, strict=True)], ".2f") for peer in peers]
    hours = GIGABYTES * 1e9 / size * float(np.median(totals["m6 data corpus"])) / 3600
    notes = (
        f"{len(texts):,} documents of inews, {size / 1e6:.1f} MB in {FILES} files, {chosen.rounds} rounds after one "
        f"that does not count. The pipeline costs {ratios[0]} times datatrove's search for copies, and {ratios[1]} "
        f"times its blocks with filters. Extrapolated {GIGABYTES * 1e9 / size:,.0f} times at this rate, {GIGABYTES} GB "
        f"take {hours:.0f} core-hours; nothing of that size has run."
    )
    numbers: dict[str, Any] = {"bytes": size, "documents": len(texts), "measured": measured}
    recorder.write(["pipeline", "stage", "CPU seconds", "MB a CPU second"], rows, notes, numbers)


if __name__ == "__main__":
    main()
