"""What length-aware batches are worth: requests of skewed lengths, planned by length, by arrival, and one by one.

Every contestant gets the same requests through the same queue and the same model, in turn; a round draws new ones.
Times are CPU seconds of one thread, so that other work on the machine weighs little.

    python scripts/benchmarks/serving.py
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import Recorder, spread

from m6.config.run import load_config
from m6.model import M6ForConditionalGeneration, initialize_parameters
from m6.serving.batcher import Batcher, BatchPlanner, Task, cost_grid, measure_costs, plan_by_arrival, plan_by_length
from m6.serving.tasks import Captioning, CaptionJob
from m6.tokenizers import M6ImageProcessor, M6Processor, load_text_tokenizer

ROOT = Path(__file__).parents[2]
MAX_BATCH_SIZE = 16
LONGEST = 48
LONG_SHARE = 0.2


class WholeLength(Captioning):
    """Descriptions that end where their request says and not before: an untrained model ends at random."""

    def run(self, jobs: Sequence[CaptionJob]) -> list[str]:
        return self._caption(jobs, max(job.max_new_tokens for job in jobs))


def skewed_lengths(rng: np.random.Generator, number: int) -> list[int]:
    """Mostly short: four of five from 4 to 12, the others from 36 to 48."""
    long = rng.random(number) < LONG_SHARE
    return np.where(long, rng.integers(36, LONGEST + 1, number), rng.integers(4, 13, number)).tolist()


async def drain(task: Task, plan: BatchPlanner, jobs: Sequence[Any]) -> tuple[float, int]:
    """CPU seconds until all jobs that arrive at once are done, and the number of batches."""
    async with Batcher({"task": (task, plan)}, len(jobs)) as batcher:
        begin = time.process_time()
        await asyncio.gather(*(batcher.submit("task", job) for job in jobs))
        return time.process_time() - begin, batcher.counters.batches


def measure(
    task: Task, plans: dict[str, BatchPlanner], make_jobs: Callable[[], list[Any]], rounds: int
) -> dict[str, Any]:
    """{plan: {"seconds": [rounds], "batches": [rounds]}}, the plans in turn, in another order each round."""
    results: dict[str, Any] = {name: {"seconds": [], "batches": []} for name in plans}
    for index in range(rounds):
        jobs = make_jobs()
        names = list(plans)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            seconds, batches = asyncio.run(drain(task, plans[name], jobs))
            results[name]["seconds"].append(seconds)
            results[name]["batches"].append(batches)
    return results


def untrained(config: Path, tokenizer: Path) -> tuple[M6ForConditionalGeneration, M6Processor]:
    """The model of a run's JSON with the vocabulary of a tokenizer: neither data nor a trained model is needed."""
    text = load_text_tokenizer(tokenizer)
    sizes = {"text_vocab_size": text.text_vocab_size, "image_vocab_size": text.image_vocab_size}
    settings = load_config(config, tuple(f"m6.model.{name}={size}" for name, size in sizes.items())).model
    model = M6ForConditionalGeneration(settings).eval()
    initialize_parameters(model, seed=0)
    pictures = M6ImageProcessor(size={"height": settings.image_size, "width": settings.image_size})
    return model, M6Processor(pictures, text, num_patches=settings.num_patches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "m6_cpu.json", help="the model, untrained")
    parser.add_argument(
        "--tokenizer", type=Path, default=ROOT / "models" / "text_to_image", help="whose vocabulary the model takes"
    )
    parser.add_argument("--requests", type=int, default=64, help="that arrive at once in a round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    recorder = Recorder("serving", "Length-aware batches against padding in order of arrival")
    torch.set_num_threads(1)

    model, processor = untrained(arguments.config, arguments.tokenizer)
    side = model.config.image_size
    task = WholeLength(model, processor, LONGEST)
    costs = measure_costs(task.run_synthetic, *cost_grid(1, LONGEST, MAX_BATCH_SIZE), clock=time.process_time)
    plans: dict[str, BatchPlanner] = {
        "by length (dynamic programming)": functools.partial(
            plan_by_length, seconds=costs, max_batch_size=MAX_BATCH_SIZE
        ),
        "by arrival, padded": functools.partial(plan_by_arrival, max_batch_size=MAX_BATCH_SIZE),
        "one by one": functools.partial(plan_by_arrival, max_batch_size=1),
    }
    rng = np.random.default_rng(0)
    picture = Image.new("RGB", (side, side), "white")

    def make_jobs() -> list[CaptionJob]:
        return [CaptionJob(picture, length) for length in skewed_lengths(rng, arguments.requests)]

    results = measure(task, plans, make_jobs, arguments.rounds)
    naive = np.array(results["by arrival, padded"]["seconds"])
    rows = []
    for name, result in results.items():
        seconds = np.array(result["seconds"])
        result["ratio_to_arrival"] = (naive / seconds).tolist()
        rows.append(
            [
                name,
                spread(arguments.requests / seconds, ".1f"),
                spread(result["batches"], ".0f"),
                spread(result["ratio_to_arrival"], ".2f"),
            ]
        )
    recorder.write(
        ["plan", "requests per CPU second", "batches", "throughput over that by arrival"],
        rows,
        f"Medians over {arguments.rounds} rounds of {arguments.requests} requests, with the 10th and 90th percentile. "
        f"A request is a picture to describe with the untrained model of {arguments.config.name} and the vocabulary of "
        f"{arguments.tokenizer.name} in exactly as many tokens "
        f"as it asks for: four of five ask for 4 to 12, the others for 36 to {LONGEST}. At most {MAX_BATCH_SIZE} "
        "requests make a batch. Costs were measured in the same process before the rounds. All requests wait at the "
        "start, and their lengths are known: a model that ends its texts itself makes them upper bounds.",
        {"costs": {"lengths": costs.lengths, "batch_sizes": costs.batch_sizes, "seconds": costs.seconds.tolist()}}
        | {"results": results},
    )


if __name__ == "__main__":
    main()
