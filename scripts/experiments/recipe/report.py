"""Prints the tables of README.md from results.csv and results_gpu.csv.

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

TODAY, ON_CPU = "today", "results.csv"
Row = dict[str, str]
Run = tuple[str, str]  # the file of its device, and the seed


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


def difference(runs: dict[Run, Row], base: dict[Run, Row], loss: str) -> str:
    """The mean difference of the runs that both have with one seed on one device, and its standard deviation."""
    values = [float(row[loss]) - float(base[run][loss]) for run, row in runs.items() if run in base]
    spread = f" ({statistics.stdev(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.3f}{spread}"


def main() -> None:
    found: dict[str, dict[Run, Row]] = {}
    for file in (ON_CPU, "results_gpu.csv"):
        for row in ResultTable(HERE / file, ()).rows():
            found.setdefault(row["candidate"], {})[file, row["seed"]] = row
    target = statistics.fmean(float(row["mean_loss"]) for row in found[TODAY].values())
    tables: dict[str, list[list[str]]] = {}
    for name, runs in found.items():
        base, _, change = name.rpartition(", ")  # a change of a base may be the base of others
        reached = [steps_to(row, target) for row in runs.values()]
        share = [step / int(row["steps"]) for step, row in zip(reached, runs.values(), strict=True) if step is not None]
        cells = [change, str(len({seed for _, seed in runs}))]
        for loss in ("mean_loss", "language_modelling"):
            cells.append(f"{statistics.fmean(float(row[loss]) for row in runs.values()):.3f}")
            cells.append(difference(runs, found[base], loss) if base else "")
        cells.append(f"{statistics.fmean(share):.0%}" if len(share) == len(runs) else "never")
        seconds = [float(row["step_cpu_s"]) for (file, _), row in runs.items() if file == ON_CPU]
        cells.append(f"{statistics.fmean(seconds):.2f}" if seconds else "")
        tables.setdefault(base, []).append(cells)
    header = ["", "seeds", "mean loss", "against its base", "language modelling", "against its base"]
    header += ["of the tokens", "CPU s a step"]
    for base, lines in tables.items():
        lines.sort(key=lambda cells: float(cells[4]))  # of language modelling, which differs least between seeds
        print(f"\nFrom {base or 'nothing'}:\n\n{markdown_table(header, lines)}")


if __name__ == "__main__":
    main()
