"""Report of a run in Markdown: validation loss against n-gram models, speed, size and samples.

The reported mixture is computed from the rows read by the run, not from the weights in its configuration.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from m6.architecture.names import IGNORED_LABEL
from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.finetuning import is_exported
from m6.checkpoints.format import CheckpointReader, step_folder
from m6.checkpoints.initial import ExportedWeights
from m6.checkpoints.loading import load_run_model, load_weights, open_newest_checkpoint, open_plain_model
from m6.checkpoints.provenance import kept_initial
from m6.checkpoints.tokenizers import with_kept_tokenizers
from m6.config.run import RunConfig, load_config
from m6.data.manifest import MANIFEST_NAME, Manifest
from m6.data.order import permuted
from m6.data.pretraining import PretrainingData
from m6.data.reader import open_split
from m6.evaluation.baselines import ORDERS, Baselines, compute_baselines, run_baselines
from m6.evaluation.held_out import describe_left_out, describe_overlap, open_held_out
from m6.files import atomic_path, write_text
from m6.formatting import format_bytes, markdown_table, perplexity
from m6.generation.captioning import caption, continue_as_learned
from m6.model import M6ForConditionalGeneration, initialize_parameters, num_parameters
from m6.runs.data import open_data
from m6.runs.directory import RunDirectory, noise_scale
from m6.runs.processes import default_device
from m6.runs.provenance import hardware, read_attempts
from m6.tokenizers.processor import M6Processor


def describe_mixture(config: RunConfig, num_samples: int) -> str:
    """Returns a table of the sources with their shares and numbers of epochs; "" if the data folder is missing.

    Args:
        config: configuration of the run.
        num_samples: number of samples read by the run.
    """
    if not (config.m6.data.path / MANIFEST_NAME).is_file():
        return ""
    data = open_data(config)
    rows = [
        [source, f"{data.manifest.split(source, 'train').rows:,}", f"{share:.1%}", f"{times:.3g}"]
        for source, (share, times) in data.realised_mixture(num_samples).items()
    ]
    return "## What it read\n\n" + markdown_table(["source", "training rows", "samples", "times read"], rows)


def report_file(run_dir: Path, folder: Path | None, split: str | None) -> Path:
    """Returns the default file of a report. A report on other data or another split does not replace the run's own."""
    parts = ["report", *([] if folder is None else [folder.absolute().name]), *([] if split is None else [split])]
    return run_dir / f"{'_'.join(parts)}.md"


def write_report(
    run_dir: Path, out: Path, num_rows: int | None = None, folder: Path | None = None, split: str | None = None
) -> Path:
    """Evaluates a run's newest checkpoint and writes the report.

    The initial model, the trained model and the n-gram models are measured on the same targets.

    Args:
        run_dir: a run with a complete checkpoint.
        out: the Markdown file to write; samples are written to a folder next to it.
        num_rows: rows per objective; None: as many as during training.
        folder: the data folder to evaluate on; None: the run's own.
        split: the split to evaluate on; None: validation, with samples of the test split.

    Returns:
        ``out``.

    Raises:
        UserError: the folder is not a run, or its checkpoint or data are missing or damaged.
    """
    config = with_kept_tokenizers(run_dir, load_config(run_dir / "config.json"))
    reader = open_newest_checkpoint(run_dir)
    data = open_held_out(run_dir, config, folder, split or "validation")
    num_rows = num_rows or config.m6.evaluation.num_rows
    device = default_device()
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    model.to_empty(device=device).eval()
    initial, lost = _load_initial_weights(model, run_dir, config)
    untrained = {} if initial is None else validation_losses(model, data, num_rows)
    # One model for both measurements: a second copy might not fit into memory.
    load_weights(model, reader)
    trained = validation_losses(model, data, num_rows)
    if folder is None and split is None:
        baselines = run_baselines(run_dir, config, num_rows)
    else:
        baselines = _baselines_on(data, run_dir, config, num_rows)
    metrics = RunDirectory(run_dir).read_metrics()
    parts = [
        f"# {run_dir.absolute().name}",
        _origin(run_dir, config, reader, device),
        f"## Loss on {data.split} of {data.manifest.folder}",
        f"Nats per target token, with the perplexity in brackets, on up to {num_rows} rows "
        "for each objective." + _missing(config, lost, not baselines),
        _loss_table(initial, untrained, trained, baselines, reader.state["step"]),
        *_by_source(trained, data.sources),
        *filter(None, [describe_left_out(config, data), describe_overlap(run_dir, data)]),
        *filter(None, [describe_mixture(config, reader.state["samples_seen"])]),
        "## Speed and size",
        markdown_table(["quantity", "value"], [*_speed(metrics, config), *_sizes(config, reader, metrics)]),
    ]
    del model
    # Loaded as in m6 generate: without a capacity, and with the list of learned objectives.
    model, processor = load_run_model(run_dir, device)
    samples = write_samples(
        model,
        processor,
        data.manifest,
        data.sources,
        out.parent / f"{out.stem}_samples",
        split or "test",
    )
    if samples:
        parts += ["## What it writes", samples]
    write_text(out, "\n\n".join(parts) + "\n")
    return out


class Losses(NamedTuple):
    """Losses of an objective in nats per target.

    Attributes:
        mean: mean over all targets.
        targets: number of targets.
        by_source: mean over the targets of each source.
    """

    mean: float
    targets: int
    by_source: dict[str, float]


@torch.no_grad()
def validation_losses(model: M6ForConditionalGeneration, data: PretrainingData, num_rows: int) -> dict[str, Losses]:
    """Returns the losses of each objective with rows in the split."""
    losses = {}
    for objective in data.active_objectives:
        sums = torch.zeros(2, len(data.sources), dtype=torch.float64)
        for cpu_batch in data.validation_micro_batches(objective, num_rows, data.split):
            batch = cpu_batch.to(model.device)
            # Summed per target, not per batch: batches have different numbers of targets.
            output = model(**batch.model_inputs(), labels=batch.labels, return_logits=False)
            sources = cpu_batch.data_source_ids[cpu_batch.labels != IGNORED_LABEL]
            sums[0].index_add_(0, sources, output.target_losses.double().cpu())
            sums[1] += torch.bincount(sources, minlength=len(data.sources))
        total, targets = sums.sum(1).tolist()
        if targets:
            by_source = {
                name: loss / count for name, loss, count in zip(data.sources, *sums.tolist(), strict=True) if count
            }
            losses[objective] = Losses(total / targets, int(targets), by_source)
    return losses


def _load_initial_weights(
    model: M6ForConditionalGeneration, run_dir: Path, config: RunConfig
) -> tuple[str | None, str | None]:
    """Loads the initial weights of the run. Returns a title for them, or None and the reason if they are missing."""
    init = config.m6.init
    if init is None:
        # The run's seed gives the same initial weights as in training.
        initialize_parameters(model, config.m6.training.seed)
        return "untrained", None
    if not init.is_dir():
        return None, f"{init} is missing"
    if is_exported(init):
        load_weights(model, ExportedWeights(init))
        return "before fine-tuning", None
    record = kept_initial(run_dir)
    folders = complete_checkpoints(RunDirectory(init).checkpoints)
    steps = None if record is None else record.steps
    if steps is not None:  # the run in ``init`` may have continued since
        folders = [folder for folder in folders if folder.name == step_folder(steps)]
    if not folders:
        return None, f"{init} no longer holds " + ("a checkpoint" if steps is None else f"that of step {steps}")
    load_weights(model, open_plain_model(CheckpointReader(folders[-1])))
    return "before fine-tuning", None


def _missing(config: RunConfig, lost: str | None, baselines: bool) -> str:
    """Names missing columns in the table of losses, with reasons."""
    sentences = []
    if lost:
        sentences.append(f" The weights before fine-tuning are left out: {lost}.")
    if baselines:
        sentences.append(
            f" The n-gram models are left out: {config.m6.data.path}, whose training split they count, is missing."
        )
    return "".join(sentences)


def _origin(run_dir: Path, config: RunConfig, reader: CheckpointReader, device: torch.device) -> str:
    attempts = read_attempts(run_dir)
    lines = []
    if attempts:
        first, last = attempts[0], attempts[-1]
        lines.append(
            f"- trained: since {first.time}, {_count(len(attempts), 'attempt')}, "
            f"{_count(last.world_size, 'rank')}, torch {last.version('torch')}, "
            f"deepspeed {last.version('deepspeed')}"
        )
    state = reader.state
    lines += [
        f"- checkpoint: step {state['step']} of {config.m6.training.total_steps}, {state['samples_seen']:,} samples "
        f"and {state['tokens_seen']:,} tokens seen",
        f"- evaluated: {time.strftime('%Y-%m-%d')}, on {hardware(device)}, torch {torch.__version__}, fp32",
    ]
    return "\n".join(lines)


def _baselines_on(held_out: PretrainingData, run_dir: Path, config: RunConfig, num_rows: int) -> Baselines:
    """The n-gram models of the run's training split, evaluated on other data; empty if the run's data are missing."""
    if not (config.m6.data.path / MANIFEST_NAME).is_file():
        return {}
    return compute_baselines(config, open_held_out(run_dir, config, None, "train"), num_rows, held_out)


def _loss_table(
    initial: str | None,
    untrained: dict[str, Losses],
    trained: dict[str, Losses],
    baselines: Baselines,
    step: int,
) -> str:
    ngrams = {objective: baselines.get(objective, {}) for objective in trained}
    rows = [
        [
            objective,
            f"{losses.targets:,}",
            *([_loss(untrained[objective].mean)] if initial else []),
            f"**{_loss(losses.mean)}**",
            *(_loss(ngrams[objective][name]) if name in ngrams[objective] else "" for name in ORDERS if baselines),
        ]
        for objective, losses in trained.items()
    ]
    measured = [*([initial] if initial else []), f"step {step}", *(ORDERS if baselines else ())]
    return markdown_table(["objective", "targets", *measured], rows)


def _by_source(trained: dict[str, Losses], sources: list[str]) -> list[str]:
    """The losses of each source; nothing if there is one source."""
    rows = [
        [objective, *(_loss(losses.by_source[name]) if name in losses.by_source else "" for name in sources)]
        for objective, losses in trained.items()
    ]
    return ["Of each source:", markdown_table(["objective", *sources], rows)] if len(sources) > 1 else []


def _speed(metrics: list[dict[str, Any]], config: RunConfig) -> list[list[str]]:
    """Returns table rows: medians over the log intervals, with the 10th and 90th percentile."""
    entries = [entry for entry in metrics if "tokens_per_second" in entry]
    if not entries:
        return []

    def percentiles(key: str, format_value: str) -> str:
        low, median, high = np.percentile([entry[key] for entry in entries], [10, 50, 90])
        return f"{median:{format_value}} (10 % to 90 %: {low:{format_value}} to {high:{format_value}})"

    def share(key: str) -> str:
        # A ratio of sums weights intervals by their length.
        return f"{sum(e[key] for e in entries) / sum(e['step_time_s'] for e in entries):.2%} of the time"

    return [
        ["tokens per second, median", percentiles("tokens_per_second", ",.0f")],
        ["samples per second, median", percentiles("samples_per_second", ",.1f")],
        ["step time in s, median", percentiles("step_time_s", ".3f")],
        ["model GFLOP/s, median", f"{np.median([e['model_flops_per_second'] for e in entries]) / 1e9:,.1f}"],
        *_utilisation(entries),
        *_noise(entries),
        *_experts(entries, config),
        ["waiting for data", share("data_wait_s")],
        ["stalled by checkpoints", share("checkpoint_stall_s")],
        ["memory of rank 0, highest", format_bytes(max(entry["memory_bytes"] for entry in entries))],
        ["skipped steps", str(sum(entry["skipped_steps"] for entry in entries))],
        ["rows that could not be used", str(sum(entry["bad_rows"] for entry in entries))],
    ]


def _noise(entries: list[dict[str, Any]]) -> list[list[str]]:
    scale = noise_scale(entries[len(entries) // 2 :])
    return [] if scale is None else [["gradient noise scale in samples, second half of the run", f"{scale:,.0f}"]]


def _experts(entries: list[dict[str, Any]], config: RunConfig) -> list[list[str]]:
    """Table rows of routing under the capacity in training, as means over log intervals; none for a dense model."""
    if config.model.moe is None or (computed := _mean(entries, "experts_per_token")) is None:
        return []
    by_layer = [entry["experts"]["tokens_without_expert"] for entry in entries if "tokens_without_expert" in entry]
    chosen, without, gates = (
        config.model.moe_config().experts_per_token,
        np.mean(by_layer, 0),
        _mean(entries, "gate_sum"),
    )
    layers = f" (by layer: {', '.join(f'{share:.1%}' for share in without)})" if len(without) > 1 else ""
    return [
        [f"experts that computed a token, of {chosen} chosen", f"{computed:.4g}"],
        ["choices beyond the capacity", f"{_mean(entries, 'dropped_fraction'):.1%}"],
        ["tokens without an expert in a layer", f"{_mean(entries, 'tokens_without_expert'):.1%}{layers}"],
        *([] if gates is None else [["sum of the gates of a token", f"{gates:.3f}"]]),
    ]


def _mean(entries: list[dict[str, Any]], key: str) -> float | None:
    """The mean over the log intervals with a value; None if there is none."""
    values = [entry[key] for entry in entries if entry.get(key) is not None]
    return float(np.mean(values)) if values else None


def _sizes(config: RunConfig, reader: CheckpointReader, metrics: list[dict[str, Any]]) -> list[list[str]]:
    computed, expected = _mean(metrics, "experts_per_token"), config.expected_routing
    if computed is None and expected is not None:  # metrics without this value
        computed = expected.experts_per_token
    counts = num_parameters(config.model, experts_per_token=computed)
    return [
        ["checkpoint", format_bytes(sum(file["bytes"] for file in reader.files.values()))],
        ["parameters", f"{counts['total']:,}"],
        ["parameters active for one token", f"{counts['active_per_token']:,}"],
    ]


def _loss(nats: float) -> str:
    return f"{nats:.3f} ({perplexity(nats):,.1f})"


def _utilisation(entries: list[dict[str, Any]]) -> list[list[str]]:
    """Returns a table row; empty if the peak FLOP/s of the device are unknown."""
    shares = [entry["mfu"] for entry in entries if entry["mfu"] is not None]
    return [["model FLOPs utilisation, median", f"{np.median(shares):.1%}"]] if shares else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


PICTURES = 64  # images captioned per source
SHOWN = 5  # samples shown per source
PROMPT_CHARACTERS = 10  # characters of a passage used as the prompt


def write_samples(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    manifest: Manifest,
    sources: list[str],
    folder: Path,
    split: str = "test",
) -> str:
    """Captions images and continues passages of a split.

    The samples are the first rows in a fixed random order: they are not selected by quality.

    Args:
        model: the model in evaluation mode.
        processor: processor of the model.
        manifest: manifest of the data folder.
        sources: names of the sources; other kinds than images and texts are skipped.
        folder: folder for the shown images (PNG), in the same folder as the Markdown file.

    Returns:
        Markdown. For each source of images: the number of captions equal to the reference, among up to ``PICTURES``
        images, and the first ``SHOWN`` captions. For each source of texts: ``SHOWN`` continuations.
    """
    parts = []
    for source in sources:
        if manifest.split(source, split).rows == 0:
            continue
        if manifest.sources[source].kind == "image_text":
            parts.append(_captions(model, processor, manifest, source, folder, split))
        elif manifest.sources[source].kind == "text":
            parts.append(_continuations(model, processor, manifest, source, split))
    return "\n\n".join(parts)


def _captions(
    model: M6ForConditionalGeneration, processor: M6Processor, manifest: Manifest, source: str, folder: Path, split: str
) -> str:
    rows = list(_rows(manifest, source, split, PICTURES))
    pictures = [Image.open(io.BytesIO(row["image"])) for row in rows]
    longest = max(len(processor.tokenizer.encode_ids(row["text"])) for row in rows)
    # Room for the longest reference, up to the model's length.
    most = min(max(24, longest + 1), model.config.max_position_embeddings)
    texts = caption(model, processor, pictures, num_beams=1, max_new_tokens=most, do_sample=False)
    exact = sum(text == processor.tokenizer.writable(row["text"]) for text, row in zip(texts, rows, strict=True))
    lines = [
        f"**{source}**: {exact} of {len(rows)} {split} pictures are described with exactly the reference's words.",
        "",
    ]
    shown = []
    for index in range(min(SHOWN, len(rows))):
        file = folder / f"{source}_{index}.png"
        with atomic_path(file) as temporary:
            pictures[index].save(temporary, format="PNG")
        shown.append([f"![{file.name}]({folder.name}/{file.name})", _cell(texts[index]), _cell(rows[index]["text"])])
    return "\n".join([*lines, markdown_table(["picture", "generated", "reference"], shown, "lll")])


def _continuations(
    model: M6ForConditionalGeneration, processor: M6Processor, manifest: Manifest, source: str, split: str
) -> str:
    prompts = [row["text"][:PROMPT_CHARACTERS] for row in _rows(manifest, source, split, SHOWN)]
    texts = continue_as_learned(model, processor, prompts, max_new_tokens=32, do_sample=False)
    lines = [f"**{source}**: greedy continuations of the first {PROMPT_CHARACTERS} characters of {split} passages.", ""]
    lines += [
        f"- {_cell(prompt)} → {_cell(text.removeprefix(prompt))}" for prompt, text in zip(prompts, texts, strict=True)
    ]
    return "\n".join(lines)


def _rows(manifest: Manifest, source: str, split: str, number: int) -> Iterator[dict[str, Any]]:
    data = open_split(manifest, source, split)
    for index in range(min(number, len(data))):
        yield data[permuted(index, len(data), key=0)]


def _cell(text: str) -> str:
    """Returns a text as one line with escaped bars, for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
