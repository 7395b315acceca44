"""Prints the table of README.md from results.csv.

python scripts/experiments/recipe/report.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from experiment import ResultTable  # noqa: E402

from m6.formatting import markdown_table  # noqa: E402

TODAY = "today"
Row = dict[str, str]


def steps_to(row: Row, loss: float) -> float | None:
    """The step at which the run's mean validation loss is down to ``loss``; between validations a straight line."""
    before: tuple[float, float] | None = None
    for point in row["curve"].split():
        step, value = map(float, point.split(":"))
        if value <= loss:
            if before is None:
                return step
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (step - before[0])
        before = (step, value)
    return None


def main() -> None:
    rows = ResultTable(HERE / "results.csv", ()).rows()
    runs: dict[str, dict[str, Row]] = {}
    for row in rows:
        runs.setdefault(row["candidate"], {})[row["seed"]] = row
    target = statistics.fmean(float(row["mean_loss"]) for row in runs[TODAY].values())
    lines = []
    for name, seeds in runs.items():
        base = name.rpartition(", ")[0] or name  # a change of a base may be the base of others
        pairs = [
            (float(row["mean_loss"]), float(runs[base][seed]["mean_loss"]))
            for seed, row in seeds.items()
            if seed in runs[base]
        ]
        differences = [mine - theirs for mine, theirs in pairs]
        text = statistics.fmean(float(row["language_modelling"]) for row in seeds.values())
        reached = [steps_to(row, target) for row in seeds.values()]
        share = [
            step / int(row["steps"]) for step, row in zip(reached, seeds.values(), strict=True) if step is not None
        ]
        lines.append(
            [
                name,
                str(len(seeds)),
                f"{statistics.fmean(mine for mine, _ in pairs):.3f}",
                "" if name == base else f"{statistics.fmean(differences):+.3f}{_spread(differences)}",
                f"{text:.3f}",
                f"{statistics.fmean(share):.0%}" if len(share) == len(seeds) else "never",
                f"{statistics.fmean(float(row['step_cpu_s']) for row in seeds.values()):.2f}",
            ]
        )
    header = [
        "candidate",
        "seeds",
        "mean loss",
        "against its base",
        "language modelling",
        "of the tokens",
        "CPU s a step",
    ]
    print(markdown_table(header, lines))


def _spread(values: list[float]) -> str:
    return f" ({statistics.stdev(values):.3f})" if len(values) > 1 else ""


if __name__ == "__main__":
    main()
