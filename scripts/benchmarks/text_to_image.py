"""How fast pictures are drawn with a key-value cache; README.md says how to read it."""

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
from m6.generation.text_to_image import Sampling, draw_codes, uniform_numbers
from m6.model import M6Config, M6ForConditionalGeneration
from m6.tokenizers.text import load_text_tokenizer

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)
CAPTION = "一只红色的熊猫"


@app.callback()
def _group() -> None:
    """Keeps ``cache`` a command of its own."""


@app.command()
def cache(
    config: Annotated[Path, typer.Option(help="whose model, untrained, draws")] = ROOT / "configs" / "m6_cpu.json",
    codes: Annotated[int, typer.Option(help="of a picture")] = 256,
    batch: Annotated[list[int], typer.Option(help="pictures at a time; may be given often")] = [1, 8],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="measurements of each contestant, in turn")] = 5,
) -> None:
    """Drawing with the static cache against computing everything again for each code, both with guidance."""
    recorder = Recorder("text_to_image_cache", f"Drawing {codes} codes with and without a key-value cache")
    torch.set_num_threads(1)
    run = load_config(config)
    processor = make_processor(run, load_text_tokenizer(run.m6.data.tokenizer))
    torch.manual_seed(0)
    shape = {**run.document["m6"]["model"], "max_position_embeddings": codes + 4}
    model = M6ForConditionalGeneration(M6Config(**shape, moe=run.document["m6"].get("moe"))).eval()
    rows, numbers = [], {}
    for size in batch:
        measure(model, processor, codes, size)  # does not count
        times: dict[str, list[float]] = {"cached": [], "uncached": []}
        drawn = {}
        for _ in range(rounds):
            for name in times:
                seconds, drawn[name] = measure(model, processor, codes, size, use_cache=name == "cached")
                times[name].append(seconds)
        ratios = [slow / fast for slow, fast in zip(times["uncached"], times["cached"], strict=True)]
        same = float((drawn["cached"] == drawn["uncached"]).all(dim=1).double().mean())
        rows.append(
            [
                str(size),
                f"{statistics.median(times['cached']):.2f}",
                f"{statistics.median(times['uncached']):.2f}",
                spread(ratios),
                f"{same:.0%}",
            ]
        )
        numbers[str(size)] = {"cpu_s": times, "ratio": ratios, "same": same}
        header = ["pictures at a time", "cached, s", "uncached, s", "times faster", "same pictures"]
        recorder.write(header, rows, notes(rounds), {"batches": numbers})


def measure(model: Any, processor: Any, codes: int, size: int, use_cache: bool = True) -> tuple[float, torch.Tensor]:
    """This process's CPU time for ``size`` pictures, and their codes."""
    uniform = torch.stack([uniform_numbers(0, CAPTION, index, codes) for index in range(size)])
    begin = time.process_time()
    drawn = draw_codes(
        model,
        processor,
        [CAPTION] * size,
        uniform,
        codebook_size=model.config.image_vocab_size,
        sampling=Sampling(),
        use_cache=use_cache,
    )
    return time.process_time() - begin, drawn


def notes(rounds: int) -> str:
    return f"""\
CPU time of one process on one thread; medians, and for the ratio the 10th and 90th percentile, over {rounds}
interleaved rounds after one that does not count. With guidance every picture is two rows. The cache is transformers'
static one. Same pictures: drawn from the same random numbers; sums in another order may tip a code over in rare cases.
Target: at least 5 times faster.
"""


if __name__ == "__main__":
    app()
