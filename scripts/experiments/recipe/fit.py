"""Fits the scaling law to ladder.csv, writes it for `m6 plan`, and prints the page ladder.md.

python scripts/experiments/recipe/fit.py > scripts/experiments/recipe/ladder.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from experiment import ROOT, ResultTable  # noqa: E402
from ladder import HELD_OUT, KEY, TABLE, Rung, rungs  # noqa: E402

from m6.config.run import load_config  # noqa: E402
from m6.files import write_json  # noqa: E402
from m6.formatting import markdown_table  # noqa: E402
from m6.planning.loss import Recipe, Scale, ScalingLaw, fit, fit_law, recipe_of  # noqa: E402
from m6.plots.style import plotting, save_figure  # noqa: E402

MEASURE = "validation loss of language modelling in nats a token"
HEAD = """# The ladder

Losses of [{count} runs](ladder.csv) with the recipe, and the law that is fitted to them:

L = {floor:.3f} + ({a:.3f} (N X^{gamma:.3f})^-{alpha:.3f} + {b:.3f} D^-{beta:.3f})^{kappa:.3f}

L: {measure}. N: active parameters in millions, without embeddings and patches. X: experts
over the experts that a token visits. D: tokens in millions, without padding. With the last power 1 the sum is that of
Hoffmann et al. (arXiv 2203.15556), without a constant that of Kaplan et al. (arXiv 2001.08361), where parameters matter
less the fewer tokens there are; the power of X is after Clark et al. (arXiv 2202.01169).

Median error {median:.2%}, largest {largest:.2%}. `m6 plan` predicts from [this law](../../../configs/scaling/law.json);
its 95 % interval comes from {resamples} fits of runs drawn with replacement, and from the errors of single runs.

![loss over compute](ladder.png)
"""


@dataclass(frozen=True)
class Run:
    """A finished run of the ladder."""

    rung: Rung
    recipe: Recipe
    scale: Scale
    loss: float
    positions: int


def finished() -> list[Run]:
    """All runs of ladder.csv, seed 0."""
    known = {str(rung): rung for rung in (*rungs(), HELD_OUT)}
    found = []
    for row in ResultTable(TABLE, KEY).rows():
        rung = known[row["run"]]
        config = load_config(HERE / "small.json", rung.overrides())
        scale = Scale.of(config.model, int(row["tokens_seen"]))
        positions = rung.steps * config.deepspeed.train_batch_size * config.m6.data.sequence_length
        found.append(Run(rung, recipe_of(config), scale, float(row["language_modelling"]), positions))
    return found


def left_out(runs: list[Run], largest: bool) -> list[tuple[str, float]]:
    """(what was left out, largest relative error of its prediction) by size, or by the compute of the largest runs."""
    found = []
    if largest:
        ordered = sorted(runs, key=lambda run: run.scale.flops)
        groups = [(f"the {number} runs of most compute", ordered[-number:]) for number in (3, 6)]
    else:
        widths = sorted({run.rung.width for run in runs})
        groups = [(f"width {width}", [run for run in runs if run.rung.width == width]) for width in widths]
    for name, group in groups:
        rest = [run for run in runs if run not in group]
        law = fit([run.scale for run in rest], [run.loss for run in rest])
        found.append((name, max((law.loss(run.scale) / run.loss - 1 for run in group), key=abs)))
    return found


def table(runs: list[Run], law: ScalingLaw) -> str:
    """Every run with the fit's error."""
    rows = [
        [
            str(run.rung),
            f"{run.scale.parameters / 1e6:.2f}",
            f"{run.scale.expansion:g}",
            f"{run.scale.tokens / 1e6:.2f}",
            f"{run.scale.flops:.2e}",
            f"{run.loss:.3f}",
            f"{law.fit.loss(run.scale):.3f}",
            f"{law.fit.loss(run.scale) / run.loss - 1:+.1%}",
        ]
        for run in sorted(runs, key=lambda run: run.scale.flops)
    ]
    columns = ["run", "N, million", "X", "D, million", "FLOPs 6ND", "loss", "fit", "error"]
    return markdown_table(columns, rows, "lrrrrrrr")


def draw(runs: list[Run], law: ScalingLaw, out: Path) -> None:
    """Loss over compute, one panel per number of experts, with the fit as lines."""
    experts, widths = sorted({run.rung.experts for run in runs}), sorted({run.rung.width for run in runs})
    with plotting() as pyplot:
        figure, panels = pyplot.subplots(
            1,
            len(experts),
            figsize=(3.4 * len(experts), 3.6),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, number in zip(panels[0], experts, strict=True):
            for color, width in enumerate(widths):
                points = sorted(
                    (run.scale.flops, run.loss, law.fit.loss(run.scale))
                    for run in runs
                    if (run.rung.width, run.rung.experts) == (width, number)
                )
                if not points:
                    continue
                flops, losses, fitted = zip(*points, strict=True)
                axes.plot(flops, fitted, linewidth=1, color=f"C{color}")
                axes.scatter(flops, losses, s=16, color=f"C{color}", label=f"width {width}")
            axes.set(xscale="log", xlabel="FLOPs", title=f"{number} experts" if number else "dense")
        panels[0][0].set(ylabel="language modelling, nats a token")
        figure.legend(
            *panels[0][experts.index(HELD_OUT.experts)].get_legend_handles_labels(), loc="outside right center"
        )
        save_figure(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "configs" / "scaling" / "law.json")
    parser.add_argument("--plot", type=Path, default=HERE / "ladder.png")
    arguments = parser.parse_args()
    everything = finished()
    runs = [run for run in everything if run.rung != HELD_OUT]
    [recipe] = {str(run.recipe): run.recipe for run in runs}.values()  # a law is of one
    law = fit_law(
        [run.scale for run in runs],
        [run.loss for run in runs],
        sum(run.scale.tokens for run in runs) / sum(run.positions for run in runs),
        "scripts/experiments/recipe/ladder.md",
        MEASURE,
        recipe,
    )
    write_json(arguments.out, law.model_dump(mode="json"))
    errors = [abs(law.fit.loss(run.scale) / run.loss - 1) for run in runs]
    spread = {"median": statistics.median(errors), "largest": max(errors)}
    print(HEAD.format(count=len(runs), measure=MEASURE, resamples=len(law.resampled), **law.fit.model_dump(), **spread))
    print(table(runs, law), end="\n\n")
    rows = [[name, f"{error:+.2%}"] for largest in (False, True) for name, error in left_out(runs, largest)]
    print(markdown_table(["left out of the fit", "largest error of its runs"], rows, "lr"))
    steps = HELD_OUT.steps
    tokens = statistics.fmean(run.scale.tokens / run.rung.steps for run in runs) * steps
    scale = Scale.of(load_config(HERE / "small.json", HELD_OUT.overrides()).model, tokens)
    beyond = ", ".join(f"{name} {factor:.2g} times" for name, factor in law.beyond(scale).items())
    print(f"\n## A larger run\n\n{HELD_OUT}, {scale.flops:.2e} FLOPs, beyond the runs of the fit in {beyond}.")
    print(f"Predicted from the other runs: {law.predict(scale)} nats.")
    for run in everything:
        if run.rung == HELD_OUT:
            print(
                f"Trained: {run.loss:.3f} nats; the prediction is off by {law.fit.loss(run.scale) / run.loss - 1:+.2%}."
            )
    draw(runs, law, arguments.plot)


if __name__ == "__main__":
    main()
