"""Scores the planner on layouts that others measured: ``python -m scripts.benchmarks.planner.published``.

Constants are fitted to some models and tested on another one; published/README.md says where the rows are from.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from m6.config.run import RunConfig, load_config, parse_config
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.pipeline_time import any_stages
from m6.planning.cost.step_time import TimeModel
from m6.planning.machine.calibration import fit_factors, kendall_tau, regret
from m6.planning.machine.cluster import load_cluster
from m6.planning.machine.profile import Profile, StepPart
from m6.training.sizes import BatchShape
from scripts.benchmarks.record import ROOT, Recorder

FOLDER = Path(__file__).with_name("published")
SEQUENCE_LENGTH, VOCAB_SIZE = 2048, 250_880
USABLE_GB = 80.0


@dataclass(frozen=True)
class Row:
    """A measured layout; ``memory_gb`` is infinite where it ran out of memory, and None where nobody noted it."""

    use: str
    config: RunConfig
    layout: ParallelLayout
    memory_gb: float | None
    seconds: float | None
    fp32_gradients: bool
    balanced: bool

    @property
    def name(self) -> str:
        model, layout = self.config.model, self.layout
        batch = self.config.deepspeed.train_batch_size
        return (
            f"{model.num_layers} x {model.hidden_size}, dp {layout.dp_size} tp {layout.tp_size} pp {layout.pp_size} "
            f"mb {layout.micro_batch_size} gb {batch}"
        )


def read_rows() -> list[Row]:
    with (FOLDER / "bloom_a100.csv").open(encoding="utf-8", newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> Row:
    def number(name: str) -> int:
        return int(line[name])

    dp, tp, pp = number("dp"), number("tp"), number("pp")
    layout = ParallelLayout(dp * tp * pp, 1, tp, pp, 1, number("micro_batch"), checkpointing=True, placement="megatron")
    config = gpt(number("layers"), number("hidden"), number("heads"), number("global_batch"))
    memory = line["memory_gb"]
    return Row(
        line["use"],
        config,
        layout,
        math.inf if memory == "OOM" else float(memory) if memory else None,
        float(line["seconds"]) if line["seconds"] else None,
        line["fp32_gradients"] == "1",
        line["cuts"] == "balanced",
    )


def gpt(layers: int, hidden: int, heads: int, global_batch: int) -> RunConfig:
    """A dense M6 of GPT's sizes, without pictures; its attention writes the scores out, as Megatron's did then."""
    document = load_config(ROOT / "configs" / "papers" / "m6t_base.json").document
    document["train_batch_size"], document["train_micro_batch_size_per_gpu"] = global_batch, 1
    document["m6"]["training"]["ep_size"] = 1
    document["m6"]["moe"] = None
    document["m6"]["data"]["sequence_length"] = SEQUENCE_LENGTH
    document["m6"]["model"] |= {
        "text_vocab_size": VOCAB_SIZE - 1,
        "image_vocab_size": 1,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_attention_heads": heads,
        "ffn_hidden_size": 4 * hidden,
        "max_position_embeddings": SEQUENCE_LENGTH,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.1,
    }
    return parse_config(document)


def even_cut(layers: int, stages: int) -> tuple[int, ...]:
    """Every stage but the last has the same number of layers."""
    each = math.ceil(layers / stages)
    return (*[each] * (stages - 1), layers - each * (stages - 1))


ONE_SAMPLE = BatchShape(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, SEQUENCE_LENGTH, 0)
CLUSTER = load_cluster(FOLDER / "jean_zay_x384.json")


def time_parts(row: Row, profile: Profile) -> dict[str, float]:
    """Seconds by part; the pipeline's bubble is spread over what it is a share of, so that factors reach it."""
    memory = MemoryModel(row.config, profile, ONE_SAMPLE)
    time = TimeModel(row.config, CLUSTER.first(row.layout.world_size), profile, memory)
    parts = time(with_stages(row, time)).parts()
    bubble = parts.pop("bubble")
    inside = ("matmul", "experts", "elementwise", "launch", "exchange")
    inflation = 1 + bubble / sum(parts[name] for name in inside)
    return {name: value * (inflation if name in inside else 1.0) for name, value in parts.items()}


def with_stages(row: Row, time: TimeModel) -> ParallelLayout:
    """The layout of a row with the stages that it had."""
    layout = row.layout
    if layout.pp_size == 1:
        return layout
    if row.balanced:
        return time.pipeline.with_cut(layout, any_stages, any_stages) or layout
    return replace(layout, cut=even_cut(row.config.model.num_layers, layout.pp_size))


def memory_parts(row: Row) -> tuple[float, float]:
    """GB of model states and buffers, and of activations, by the formulas of this engine.

    Gradients that are added up in 4 bytes come on top.
    """
    model = MemoryModel(row.config, Profile(), ONE_SAMPLE)
    found = model(row.layout)
    extra = 4 * model.counts(row.layout).divided(row.layout).local if row.fp32_gradients else 0
    return (found.peak - found.activations + extra) / 1e9, found.activations / 1e9


def fit_memory(rows: Sequence[Row]) -> tuple[float, float]:
    """(GB of driver and libraries, bytes kept for each predicted byte of activations), by least squares."""
    found = [
        (memory_parts(row), row.memory_gb) for row in rows if row.memory_gb is not None and row.memory_gb < math.inf
    ]
    columns = np.array([[1.0, activations] for (_, activations), _ in found])
    rest = np.array([measured - states for (states, _), measured in found])
    constant, slope = np.linalg.lstsq(columns, rest, rcond=None)[0]
    return float(constant), float(slope)


def score_times(rows: list[Row], profile: Profile) -> tuple[list[float], dict[str, float]]:
    """Predicted seconds, and how good they are; layouts are compared by seconds for a row of the global batch."""
    predicted = [sum(time_parts(row, profile).values()) for row in rows]
    return predicted, _scores(rows, predicted)


def _scores(rows: list[Row], predicted: Sequence[float]) -> dict[str, float]:
    measured = [row.seconds or 0.0 for row in rows]
    batches = [row.config.deepspeed.train_batch_size for row in rows]
    expected = [seconds / batch for seconds, batch in zip(predicted, batches, strict=True)]
    found = [seconds / batch for seconds, batch in zip(measured, batches, strict=True)]
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return {
        "mean_error": statistics.mean(errors),
        "tau": kendall_tau(expected, found),
        "regret": regret(expected, found),
        "random_regret": statistics.mean(found) / min(found) - 1,
    }


def main() -> None:
    recorder = Recorder("planner_published", "Predictions against layouts that others measured")
    rows = read_rows()
    fitted, tested = ([row for row in rows if row.use == use] for use in ("fit", "test"))
    timed, tested_times = ([row for row in each if row.seconds is not None] for each in (fitted, tested))
    factors = fit_factors([time_parts(row, Profile()) for row in timed], [row.seconds or 0 for row in timed])
    calibrated = Profile(factors=factors)
    predicted, scores = score_times(tested_times, calibrated)
    rate = statistics.mean((row.seconds or 0) / _work(row) for row in timed)
    comparison = {
        "the planner, fitted to other models": scores,
        "the planner, nothing fitted": score_times(tested_times, Profile())[1],
        "one rate for all, fitted to other models": _scores(tested_times, [rate * _work(row) for row in tested_times]),
        "the planner, on the rows it was fitted to": score_times(timed, calibrated)[1],
    }
    constant, slope = fit_memory(fitted)
    memory = {row.name + f" {index}": _memory(row, constant, slope) for index, row in enumerate(rows)}
    seconds = dict(zip((id(row) for row in tested_times), predicted, strict=True))
    table = []
    for row, (raw, total) in zip(rows, memory.values(), strict=True):
        if row.use == "test":
            expected = f"{seconds[id(row)]:.1f}" if id(row) in seconds else ""
            table.append([row.name, f"{row.seconds or ''}", expected, _gb(row.memory_gb), f"{total:.1f}", f"{raw:.1f}"])
    notes = "\n".join([*_time_notes(comparison, factors), *_memory_notes(rows, list(memory.values()), constant, slope)])
    header = ["tested layout", "seconds measured", "predicted", "GB measured", "predicted", "formula alone"]
    recorder.write(header, table, notes, {"scores": comparison, "factors": factors, "memory": [constant, slope]})


def _work(row: Row) -> float:
    """FLOPs of a rank."""
    model = row.config.model
    return row.config.deepspeed.train_batch_size * model.num_layers * model.hidden_size**2 / row.layout.world_size


def _memory(row: Row, constant: float, slope: float) -> tuple[float, float]:
    states, activations = memory_parts(row)
    return states + activations, states + constant + slope * activations


def _gb(value: float | None) -> str:
    return "" if value is None else "OOM" if value == math.inf else f"{value:.0f}"


def _time_notes(comparison: dict[str, dict[str, float]], factors: dict[StepPart, float]) -> list[str]:
    lines = ["| steps | mean error | Kendall's tau | regret of the choice | of a random one |", "|" + " --- |" * 5]
    for name, each in comparison.items():
        columns = (
            f"{each['mean_error']:.1%}",
            f"{each['tau']:.2f}",
            f"{each['regret']:.1%}",
            f"{each['random_regret']:.1%}",
        )
        lines.append(f"| {name} | {' | '.join(columns)} |")
    shown = ", ".join(f"{name} {value:.2f}" for name, value in factors.items())
    return [*lines, "", f"Fitted factors: {shown}.", ""]


def _memory_notes(rows: list[Row], found: list[tuple[float, float]], constant: float, slope: float) -> list[str]:
    lines = [
        "| memory | rows | mean error | of it, formula alone | out of memory, found | false alarms |",
        "|" + " --- |" * 6,
    ]
    for use in ("test", "fit"):
        chosen = [(row.memory_gb, each) for row, each in zip(rows, found, strict=True) if row.use == use]
        fitting = [(gb, each) for gb, each in chosen if gb is not None and gb < math.inf]
        errors = [[abs(each[index] / gb - 1) for gb, each in fitting] for index in (1, 0)]
        out = [each[1] > USABLE_GB for gb, each in chosen if gb == math.inf]
        false = sum(each[1] > USABLE_GB for _, each in fitting)
        lines.append(
            f"| {use} | {len(fitting)} | {statistics.mean(errors[0]):.1%} | {statistics.mean(errors[1]):.1%} | "
            f"{sum(out)} of {len(out)} | {false} of {len(fitting)} |"
        )
    return [
        *lines,
        "",
        f"Fitted: {constant:.1f} GB of driver and libraries, {slope:.2f} bytes for each predicted byte of activations.",
    ]


if __name__ == "__main__":
    main()
