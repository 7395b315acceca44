"""How fast a training step is, and what data, checkpoints and memory cost beside it; README.md says how to read it."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import psutil
import typer
from contestants import CLIPPING, HEAD_SIZE, MOE, VOCAB_SIZE, Contestant, gpt2_step, language_modelling_batch, our_step
from record import Recorder, spread
from torch import Tensor

from m6.config.run import load_config
from m6.data.collate import MicroBatch
from m6.model import num_parameters
from m6.model.outputs import M6Output
from m6.planning.cost.activations import Activations
from m6.planning.prediction import predict_memory
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.runs.signals import Requests
from m6.training.checkpointing import Checkpointer
from m6.training.engine.build import build_engine
from m6.training.sizes import BatchShape, SavedTensors, new_storages, storage_bytes
from m6.training.stages.stage import Stage
from m6.training.train_step import TrainStep

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)

ConfigFile = Annotated[Path, typer.Option("--config", help="the run's JSON")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, overrides a value of the JSON")]
DEFAULT_CONFIG = Path("configs/m6_cpu.json")


@app.command()
def speed(
    sizes: Annotated[str, typer.Option(help="HIDDENxLAYERS, separated by commas")] = "256x4,512x6",
    rows: int = 8,
    sequence_length: int = 256,
    rounds: Annotated[int, typer.Option(help="steps of each contestant, in turn")] = 20,
    warmup: Annotated[int, typer.Option(help="further rounds before them that do not count")] = 2,
) -> None:
    """Our step against GPT-2 of transformers in a plain PyTorch loop, step by step in turn."""
    recorder = Recorder("train_step_speed", "Training step against a plain PyTorch loop over GPT-2")
    batch = language_modelling_batch(rows, sequence_length)
    table, numbers = [], {}
    for name in sizes.split(","):
        hidden, layers = (int(number) for number in name.split("x"))
        contestants = {
            "ours": Contestant(our_step, hidden, layers, batch, None),
            "gpt2 gelu_new": Contestant(gpt2_step, hidden, layers, batch, "gelu_new"),
            "gpt2 gelu": Contestant(gpt2_step, hidden, layers, batch, "gelu"),
            "gpt2 gelu, our allocator": Contestant(gpt2_step, hidden, layers, batch, "gelu", True),
            "ours, MoE": Contestant(our_step, hidden, layers, batch, MOE),
        }
        times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for turn in range(warmup + rounds):
            for contestant, process in contestants.items():
                seconds = process.step()
                if turn >= warmup:
                    times[contestant].append(seconds)
        for process in contestants.values():
            process.close()
        for contestant, own in times.items():
            ratios = [second / ours for second, ours in zip(own, times["ours"], strict=True)]
            tokens_per_second = [rows * sequence_length / second for second in own]
            table.append([name, contestant, spread(own), spread(tokens_per_second, ",.0f"), spread(ratios)])
            numbers[f"{name} {contestant}"] = {"step_s": own, "time_over_ours": ratios}
    header = ["hidden x layers", "contestant", "step in s", "tokens per second", "its time over ours, round by round"]
    notes = f"""\
Medians, with the 10th and 90th percentile in brackets, over {rounds} rounds in which every contestant makes one step
in turn, in a process of its own, while the others rest. A ratio above 1 means that ours is faster.

All have {VOCAB_SIZE:,} entries in a vocabulary that input and output share, heads of {HEAD_SIZE}, an inner size of 4 x
hidden, no dropout, fp32, and {rows} rows of {sequence_length} equal token ids with a loss at the
{rows * (sequence_length - 1):,} positions that have a next token. AdamW is fused and gradients are clipped at
{CLIPPING}. Ours is the trainer's own step over a DeepSpeed engine at ZeRO stage 0 with the prefix-LM mask, exact GELU,
sums of metrics and their all-reduce; GPT-2 runs with the attention that transformers chooses (SDPA), without a cache,
once with the activation that it ships with (gelu_new, the approximation by tanh) and once with exact GELU, which is
our arithmetic. The trainer tells the allocator to keep freed memory, which a plain loop does not: "our allocator" is
the plain loop with that setting, and leaves the difference of the steps alone. The sparse model has
{MOE["num_experts"]} experts in {MOE["num_prototypes"]} prototypes in every layer, so twice the feed-forward arithmetic;
it is here for information."""
    recorder.write(header, table, notes, {"times": numbers})


class Run:
    """A run's data, engine and step, without its folder."""

    def __init__(self, file: Path, overrides: list[str] | None, num_workers: int) -> None:
        self.config, self.runtime = load_config(file, tuple(overrides or ())), start()
        self.accumulation = self.config.accumulation_steps(self.runtime.world_size)
        self.data = open_data(self.config)
        self.engine = build_engine(self.config, self.runtime)
        self.step = TrainStep(self.engine, self.config, self.runtime, Stage(self.config, None))
        self.number = 0
        self._loader = self.data.loader(itertools.count(), num_workers)

    def micro_batches(self) -> list[MicroBatch]:
        return list(itertools.islice(self._loader, self.accumulation))

    def train(self, micro_batches: list[MicroBatch]) -> None:
        self.step(self.number, micro_batches, Requests)
        self.number += 1

    def describe(self) -> str:
        counts = num_parameters(self.config.model)
        return f"{counts['total']:,} parameters, batches of {self.config.deepspeed.train_batch_size} samples"


@app.command()
def data(config: ConfigFile = DEFAULT_CONFIG, overrides: Overrides = None, steps: int = 100, warmup: int = 5) -> None:
    """The share of a step in which training waits for data, with one worker process and with none."""
    recorder = Recorder("train_step_data", "Waiting for data")
    run = Run(config, overrides, num_workers=1)
    waits, step_times, alone = [], [], []
    for index in range(warmup + steps):
        begin = time.perf_counter()
        micro_batches = run.micro_batches()
        loaded = time.perf_counter()
        run.train(micro_batches)
        if index >= warmup:
            waits.append(loaded - begin)
            step_times.append(time.perf_counter() - loaded)
    for index in range(warmup + steps):
        begin = time.perf_counter()
        for number in range(run.accumulation):
            run.data.micro_batch(index * run.accumulation + number)
        if index >= warmup:
            alone.append(time.perf_counter() - begin)
    shares = {
        "one worker process": sum(waits) / (sum(waits) + sum(step_times)),
        "no worker process": sum(alone) / (sum(alone) + sum(step_times)),
    }
    table = [
        ["one worker process", spread(waits, ".4f"), spread(step_times), f"{shares['one worker process']:.2%}"],
        ["no worker process", spread(alone, ".4f"), spread(step_times), f"{shares['no worker process']:.2%}"],
    ]
    notes = f"""\
`{config}`: {run.describe()}. {steps} steps; medians, with the 10th and 90th percentile in brackets; shares are of the
sums. With one worker the main process waits only for what is not ready; without, it makes every batch itself: that
cost was measured on its own, over the same batches, and is set against the same steps."""
    header = ["data made by", "wait for a batch in s", "rest of the step in s", "share of the time"]
    recorder.write(header, table, notes, {"wait_s": waits, "step_s": step_times, "alone_s": alone, "shares": shares})


@app.command()
def checkpoints(
    config: ConfigFile = DEFAULT_CONFIG,
    overrides: Overrides = None,
    interval: Annotated[int, typer.Option(help="steps between checkpoints")] = 50,
    repeats: Annotated[int, typer.Option(help="intervals of each kind, in turn")] = 3,
    warmup: int = 5,
) -> None:
    """The share of the time in which training stands still for checkpoints, written in line and by a thread."""
    recorder = Recorder("train_step_checkpoints", "Stalls by checkpoints")
    run = Run(config, overrides, num_workers=1)
    for _ in range(warmup):
        run.train(run.micro_batches())
    stalls: dict[str, list[float]] = {"none": [], "in line": [], "by a thread": []}
    intervals: dict[str, list[float]] = {kind: [] for kind in stalls}
    with tempfile.TemporaryDirectory(prefix="m6-benchmark-") as folder:
        savers = {
            kind: Checkpointer(Path(folder) / str(asynchronous), run.runtime, keep_last=1, async_save=asynchronous)
            for kind, asynchronous in (("in line", False), ("by a thread", True))
        }
        for _, kind in itertools.product(range(repeats), stalls):
            begin = time.perf_counter()
            saver = savers.get(kind)
            stall = saver.save(run.engine, run.number, {}) if saver else 0.0
            for _ in range(interval):
                run.train(run.micro_batches())
            end_of_steps = time.perf_counter()
            if saver:
                saver.wait()  # the next checkpoint would have to
            stalls[kind].append(stall + time.perf_counter() - end_of_steps)
            intervals[kind].append(time.perf_counter() - begin)
        files = [path for path in Path(folder).rglob("*.safetensors")]
        size = max(path.stat().st_size for path in files)
    undisturbed = sorted(intervals["none"])[repeats // 2]
    shares = {kind: [stall / undisturbed for stall in seconds] for kind, seconds in stalls.items()}
    table = [
        [kind, spread(stalls[kind]), spread(intervals[kind], ".2f"), spread(shares[kind], ".2%")] for kind in stalls
    ]
    notes = f"""\
`{config}`: {run.describe()}; {size / 2**20:,.1f} MiB a checkpoint, one every {interval} steps, in the system's folder
for temporary files. {repeats} intervals of each kind in turn; medians, with the 10th and 90th percentile in brackets. A
stall is what `Checkpointer.save` returns, and what remains to wait for at the next checkpoint; its share is that of
the steps' time without checkpoints. The whole interval also shows what the thread takes from the steps beside it."""
    header = ["written", "stall in s", f"{interval} steps and the checkpoint in s", "stall over the steps' time"]
    recorder.write(header, table, notes, {"stall_s": stalls, "interval_s": intervals, "shares": shares, "bytes": size})


@app.command()
def memory(config: ConfigFile = DEFAULT_CONFIG, overrides: Overrides = None, steps: int = 20) -> None:
    """Predicted against measured memory, part by part, and the growth of the process beside it."""
    recorder = Recorder("train_step_memory", "Predicted and measured memory")
    settings = load_config(config, tuple(overrides or ()))
    if settings.deepspeed.zero_stage:
        raise typer.BadParameter("gradients are found at zero_optimization.stage 0 alone", param_hint="--config")
    accumulation = settings.accumulation_steps(start().world_size)
    loader = open_data(settings).loader(itertools.count(), 0)
    batches = [list(itertools.islice(loader, accumulation)) for _ in range(steps)]
    with PeakOfProcess() as peak:
        run = Run(config, overrides, num_workers=0)
        for micro_batches in batches:
            run.train(micro_batches)
    shape = BatchShape.of(*itertools.chain(*batches))
    prediction = predict_memory(run.config, 1, shape)
    measured = measured_parts(run, batches)
    peak_bytes = prediction.resident + prediction.activations
    predicted = {part: getattr(prediction, part) for part in measured if part != "peak"} | {"peak": peak_bytes}
    predicted["activations"] = Activations(run.config, shape).total()  # the gradients of logits come later
    table = [
        [part.replace("_", " "), mib(predicted[part]), mib(measured[part]), f"{predicted[part] / measured[part]:.4f}"]
        for part in measured
    ]
    table.append(["growth of the process", mib(peak_bytes), mib(peak.growth), f"{peak_bytes / peak.growth:.4f}"])
    notes = f"""\
`{config}`: {run.describe()}; the largest of {steps} steps. Measured are live storages: parameters, gradients before the
update, the optimizer's state, what autograd saved for the backward pass, and the most bytes that lived at one time in a
step. The predicted peak is the sum of all parts, a bound: gradients fill up while activations are freed. The growth of
the process is its highest resident memory in steps without these measurements less that before the model was built,
when the libraries were loaded and the batches read; it also has what the allocator does not give back."""
    header = ["part", "predicted in MiB", "measured in MiB", "predicted / measured"]
    numbers = {"predicted": asdict(prediction), "measured": measured, "process_growth": peak.growth}
    recorder.write(header, table, notes, numbers)


@app.command()
def onednn(
    config: ConfigFile = Path("configs/m6_smoke.json"),
    overrides: Overrides = None,
    capacities: Annotated[str, typer.Option(help="kernels that oneDNN keeps, separated by commas")] = "0,64,1024",
    rounds: Annotated[int, typer.Option(help="steps of each contestant, in turn")] = 200,
    name: str = "train_step_onednn",
) -> None:
    """What a step takes, and how far the memory grows, with caches of different sizes for oneDNN's kernels."""
    recorder = Recorder(name, "oneDNN's cache of kernels")
    options = [int(number) for number in capacities.split(",")]
    contestants = [Contestant(cached_step, number, config, overrides, rounds) for number in options]
    times: list[list[float]] = [[] for _ in options]
    resident: list[list[int]] = [[] for _ in options]
    for _ in range(rounds):
        for contestant, seconds, held in zip(contestants, times, resident, strict=True):
            begin = contestant.cpu_seconds()
            contestant.step()
            seconds.append(contestant.cpu_seconds() - begin)
            held.append(contestant.resident_bytes())
    for contestant in contestants:
        contestant.close()
    table, quarter = [], rounds // 4
    for number, seconds, held in zip(options, times, resident, strict=True):
        ratios = [own / first for own, first in zip(seconds[quarter:], times[0][quarter:], strict=True)]
        growth = (held[-1] - held[-quarter]) / (quarter - 1)
        after = [mib(held[step] - held[0]) for step in (quarter - 1, 2 * quarter - 1, rounds - 1)]
        table.append([str(number), spread(seconds[quarter:]), spread(ratios), *after, mib(growth)])
    places = [f"MiB more after {step} steps" for step in (quarter, 2 * quarter, rounds)]
    header = ["capacity", "step in CPU s", "its time over the first", *places, "MiB per step in the last quarter"]
    notes = f"""\
`{config}`, with {overrides or "nothing"} set. The contestants take turns step by step, each in a process of its own, on
equal batches that were packed before. Medians of the processor time, which the system counts in hundredths of a second,
with the 10th and 90th percentile, without the first quarter of the {rounds} steps. Memory is the resident memory of the
process less that after its first step."""
    recorder.write(header, table, notes, {"capacities": options, "step_cpu_s": times, "resident_bytes": resident})


def cached_step(capacity: int, config: Path, overrides: list[str] | None, rounds: int) -> Callable[[], float]:
    """One step of the trainer on the next batch, which returns the loss."""
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(capacity)
    run = Run(config, overrides, num_workers=0)
    batches = iter([run.micro_batches() for _ in range(rounds)])

    def step() -> float:
        run.number += 1
        return run.step(run.number - 1, next(batches), Requests)[0].loss

    return step


def sum_of_losses(_: MicroBatch, output: M6Output) -> Tensor:
    """Of all targets of a micro-batch."""
    assert output.target_losses is not None
    return output.target_losses.sum()


def measured_parts(run: Run, batches: list[list[MicroBatch]]) -> dict[str, int]:
    """Bytes of live storages by part, each the largest over ``batches``, and at the peak of a step."""
    engine, activations = run.engine, []
    for batch in itertools.chain(*batches):
        with SavedTensors(engine.module) as saved:
            output = engine.forward(batch)
            activations.append(saved.bytes)
        del output  # and with it the graph
    run.train(batches[0])  # makes the optimizer's state
    engine.begin_step(0.0)
    engine.accumulate(batches[0], sum_of_losses, range(len(batches[0])))
    gradients = engine.gradient_bytes()
    engine.update()
    held = engine.state_bytes()
    existing = [tensor for tensors in engine.state_tensors().values() for tensor in tensors]
    peaks = []
    for micro_batches in batches:
        tensors = [tensor for batch in micro_batches for tensor in batch.tensors().values()]
        with new_storages(*existing, *tensors) as new:
            run.train(micro_batches)
        peaks.append(new.take_peak())
    return {
        "weights": held["weights"],
        "gradients": gradients,
        "optimizer_state": held["optimizer_state"],
        "activations": max(activations),
        "peak": storage_bytes(*existing) + max(peaks),
    }


class PeakOfProcess:
    """Samples this process's resident memory inside ``with``; ``growth`` is its peak less its start, in bytes."""

    def __enter__(self) -> PeakOfProcess:
        self._process, self._done, self.growth = psutil.Process(), threading.Event(), 0
        self._begin = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.growth = max(self.growth, self._process.memory_info().rss - self._begin)

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def mib(number: float) -> str:
    return f"{number / 2**20:,.1f}"


if __name__ == "__main__":
    app()
