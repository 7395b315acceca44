"""Trains a small model on the raw and on the filtered set, and prints what each learned, as Markdown.

    python scripts/experiments/corpus/compare.py [--seeds 3]     (appends to raw_or_filtered.csv; finished runs stay)

Model, optimizer and length are those of the recipe's small size, with language modelling alone: the same number of
steps, rows and positions for both sets. Sources are read in proportion to their rows. Both sets have the same
validation rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "recipe")]
from experiment import ResultTable, train  # noqa: E402
from train import candidates  # noqa: E402

from m6.formatting import markdown_table  # noqa: E402
from m6.runs.processes import start  # noqa: E402

TABLE = HERE / "raw_or_filtered.csv"
KEY = ("set", "seed")
SETS = {"raw": "data/zh_raw", "filtered": "data/zh_corpus"}
SETTINGS = [
    "torch_autocast.enabled=false",  # processors without 16-bit products would be slower with it
    "m6.data.tokenizer=data/zh_corpus/tokenizer",
    "m6.data.sources=null",
    "m6.model.image_vocab_size=0",
    *(f"m6.objectives.{name}.weight=0" for name in ("text_denoising", "image_captioning", "image_text_denoising")),
    "m6.training.total_steps=400",
    "m6.schedule.warmup_steps=40",
    "m6.evaluation.interval_steps=400",
    "m6.evaluation.num_rows=6400",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    table, runtime = ResultTable(TABLE, KEY), start()
    for seed in range(arguments.seeds):
        for name, data in SETS.items():
            if table.holds({"set": name, "seed": seed}):
                continue
            overrides = [*candidates()["recipe"], *SETTINGS, f"m6.data.path={data}", f"m6.training.seed={seed}"]
            with tempfile.TemporaryDirectory(prefix="corpus_") as folder:
                _, entries = train(HERE.parent / "recipe" / "small.json", overrides, Path(folder) / "run", runtime)
            last = next(entry for entry in reversed(entries) if "validation" in entry)
            by_source = last["validation_by_source"]["language_modelling"]
            losses = {"all": last["validation"]["language_modelling"], **by_source}
            tokens = next(entry["tokens_seen"] for entry in reversed(entries) if "tokens_seen" in entry)
            measured = {source: f"{loss:.4f}" for source, loss in losses.items()}
            table.append({"set": name, "seed": seed, "tokens_seen": tokens, **measured})
    print(report(table))


def report(table: ResultTable) -> str:
    """The mean loss of each set, and the difference over the seeds that both have."""
    rows = {(row["set"], row["seed"]): row for row in table.rows()}
    seeds = [seed for name, seed in rows if name == "filtered" and ("raw", seed) in rows]
    lines = []
    for measure in [name for name in table.rows()[0] if name not in (*KEY, "tokens_seen")]:
        raw, filtered = ([float(rows[name, seed][measure]) for seed in seeds] for name in SETS)
        gains = [b - a for a, b in zip(raw, filtered, strict=True)]
        spread = f" ({statistics.stdev(gains):.3f})" if len(gains) > 1 else ""
        means = [f"{statistics.fmean(losses):.3f}" for losses in (raw, filtered)]
        lines.append([measure, *means, f"{statistics.fmean(gains):+.3f}{spread}"])
    return markdown_table(["validation rows of", "raw", "filtered", "difference"], lines, "lrrr")


if __name__ == "__main__":
    main()
