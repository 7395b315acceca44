"""How fast pictures are drawn, masked and from left to right; README.md says how to read it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from record import ROOT, Recorder, spread

from m6.checkpoints.loading import make_processor
from m6.config.run import load_config
from m6.generation.drawing import draw_left_to_right, draw_masked, num_masked_numbers
from m6.generation.sampling import Sampling, uniform_numbers
from m6.model import M6Config, M6ForConditionalGeneration
from m6.tokenizers.image import ImageTokenizerConfig, M6ImageTokenizer
from m6.tokenizers.text import load_text_tokenizer

CAPTION = "一只红色的熊猫"
LEFT_TO_RIGHT = "left to right"
PASSES = (2, 3, 4, 6, 12)


def main(
    config: Annotated[Path, typer.Option(help="whose model, untrained, draws")] = ROOT / "configs" / "m6_cpu.json",
    grid: Annotated[int, typer.Option(help="places in a row of a picture")] = 8,
    codes_per_place: Annotated[int, typer.Option(help="codes of a place")] = 2,
    batch: Annotated[list[int], typer.Option(help="pictures at a time; may be given often")] = [1, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="measurements of each contestant, in turn")] = 5,
    device: Annotated[str, typer.Option(help="cpu, or cuda")] = "cpu",
) -> None:
    """Drawing from left to right, with a cache, against masked drawing; both with guidance."""
    number = grid**2 * codes_per_place
    file = "text_to_image_drawing" + ("" if device == "cpu" else f"_{device}")
    recorder = Recorder(file, f"Drawing pictures of {grid} x {grid} places, {number} codes")
    torch.set_num_threads(1)
    run = load_config(config)
    processor = make_processor(run.model, load_text_tokenizer(run.m6.data.tokenizer))
    torch.manual_seed(0)
    shape = {**run.document["m6"]["model"], "max_position_embeddings": number + 4}
    shape |= {"code_grid_size": grid, "codes_per_place": codes_per_place}
    model = M6ForConditionalGeneration(M6Config(**shape, moe=run.document["m6"].get("moe"))).eval().to(device)
    # Only its shape is used: the codes are not painted.
    codebook_size = model.config.image_vocab_size // codes_per_place
    tokenizer = M6ImageTokenizer(
        ImageTokenizerConfig(
            image_size=8 * grid, patch_size=8, channels=[8], codebook_size=codebook_size, num_codebooks=codes_per_place
        )
    )
    contestants = [LEFT_TO_RIGHT, *(f"masked, {passes} passes" for passes in PASSES)]
    rows, numbers = [], {}
    for size in batch:
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for name in contestants:
            measure(name, model, processor, tokenizer, size)  # does not count
        for _ in range(rounds):
            for name in contestants:
                times[name].append(measure(name, model, processor, tokenizer, size))
        for name in contestants:
            ratios = [slow / fast for slow, fast in zip(times[LEFT_TO_RIGHT], times[name], strict=True)]
            rows.append([str(size), name, f"{statistics.median(times[name]) / size:.4f}", spread(ratios, ".2f")])
        numbers[str(size)] = times
        unit = "CPU s" if device == "cpu" else "s"
        header = ["pictures at a time", "drawing", f"{unit} a picture", "times as fast as left to right"]
        recorder.write(header, rows, notes(rounds, device), {unit.replace(" ", "_").lower(): numbers})


def measure(name: str, model: Any, processor: Any, tokenizer: M6ImageTokenizer, size: int) -> float:
    """The seconds for ``size`` pictures: on a CPU this process's, elsewhere those of the clock."""
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    masked = name.startswith("masked")
    sampling = Sampling(passes=int(name.split()[1]) if masked else None)
    count = num_masked_numbers(tokenizer, sampling) if masked else tokenizer.num_codes
    uniform = torch.stack([uniform_numbers(0, CAPTION, index, count) for index in range(size)])
    arguments: dict[str, Any] = {"grid": tokenizer, "sampling": sampling}
    begin = clock()
    if masked:
        draw_masked(model, processor, [CAPTION] * size, uniform, **arguments)
    else:
        draw_left_to_right(model, processor, [CAPTION] * size, uniform, **arguments)
    return clock() - begin  # the codes are on the host: the device has ended


def notes(rounds: int, device: str) -> str:
    kind = "CPU time of one process on one thread" if device == "cpu" else f"Time of one process on {device}, in fp32"
    return f"""\
{kind}; medians, and for the ratio the 10th and 90th percentile, over {rounds}
interleaved rounds after one that does not count. With guidance every picture is two rows. The cache is transformers'
static one. The model is not trained, which changes no time: what the passes are worth is in
[the experiment](../../experiments/text_to_image/README.md).
"""


if __name__ == "__main__":
    typer.run(main)
