"""Trains the runs of the ladder and appends each finished one to ladder.csv; an interrupted run goes on.

python scripts/experiments/recipe/ladder.py [RUN ...]      (default: all that ladder.csv does not have yet, in order)
python scripts/experiments/recipe/ladder.py --list
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from experiment import ROOT, ResultTable  # noqa: E402
from train import candidates, trained  # noqa: E402

from m6.runs.processes import start  # noqa: E402

TABLE = HERE / "ladder.csv"
KEY = ("run", "seed")
WIDTHS = {64: 2, 96: 3, 128: 4, 192: 5, 256: 6}
"""Hidden size -> layers. A head has 32 dimensions; the two experts of a token have 3 times the hidden size each."""


def muon_rate(width: int) -> float:
    """Muon's learning rate for 32 samples a step: the best one at width 128, by the root of the width at others."""
    return round(0.0042 * (128 / width) ** 0.5, 5)


@dataclass(frozen=True)
class Rung:
    """A run of the ladder: its size, its experts (0: dense, as wide as the experts of one token), its length."""

    width: int
    layers: int
    experts: int
    steps: int

    def __str__(self) -> str:
        kind = f"{self.experts} experts" if self.experts else "dense"
        return f"{self.width}x{self.layers}, {kind}, {self.steps} steps"

    def overrides(self) -> list[str]:
        """Of small.json: the recipe, in this size and for this length."""
        return [
            *candidates()["recipe"],
            f"optimizer.params.lr={muon_rate(self.width)}",
            f"m6.model.hidden_size={self.width}",
            f"m6.model.num_layers={self.layers}",
            f"m6.model.num_attention_heads={self.width // 32}",
            f"m6.model.ffn_hidden_size={3 * self.width if self.experts else 6 * self.width}",
            f"m6.moe.num_experts={self.experts}" if self.experts else "m6.moe=null",
            f"m6.training.total_steps={self.steps}",
            f"m6.schedule.warmup_steps={self.steps // 10}",  # the same share of every length, as that of the decay
            f"m6.evaluation.interval_steps={self.steps // 2}",
            "m6.checkpoint.interval_steps=200",
        ]


def rungs() -> list[Rung]:
    """The runs the fit may use, those that say most first."""
    found = [Rung(width, layers, 16, 400) for width, layers in WIDTHS.items()]
    found += [Rung(width, layers, 0, 400) for width, layers in WIDTHS.items()]
    found += [Rung(width, layers, 16, steps) for steps in (200, 800) for width, layers in WIDTHS.items()]
    found += [Rung(width, layers, experts, 400) for experts in (64, 4) for width, layers in WIDTHS.items()]
    longer = itertools.product((0, 64), (200, 800), (64, 128, 192))
    found += [Rung(width, WIDTHS[width], experts, steps) for experts, steps, width in longer]
    return [*found, *(Rung(width, WIDTHS[width], 16, 1600) for width in (64, 96, 128))]


HELD_OUT = Rung(320, 8, 16, 1600)
"""Larger than every run of the fit: predicted first, then trained."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the names of all runs")
    arguments = parser.parse_args()
    known = {str(rung): rung for rung in (*rungs(), HELD_OUT)}
    if arguments.list:
        print("\n".join(known))
        return
    unknown = set(arguments.runs) - known.keys()
    if unknown:
        parser.error(f"unknown runs {', '.join(sorted(unknown))}; --list prints those there are")
    table, runtime = ResultTable(TABLE, KEY), start()
    for name in arguments.runs or [str(rung) for rung in rungs()]:
        if table.holds({"run": name, "seed": arguments.seed}):
            continue
        rung = known[name]
        folder = ROOT / "runs" / "recipe" / f"{name.replace(', ', '-').replace(' ', '_')}-{arguments.seed}"
        result = trained(rung.overrides(), arguments.seed, folder, runtime)
        sizes = {"width": rung.width, "layers": rung.layers, "experts": rung.experts}
        table.append({"run": name, "seed": arguments.seed, **sizes, **result})
        shutil.rmtree(folder)
        print(f"{name}, seed {arguments.seed}: {result['language_modelling']} nats", flush=True)


if __name__ == "__main__":
    main()
