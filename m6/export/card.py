"""The model card of an export, made of its run's records. Missing facts are called unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

import m6
from m6.checkpoints.format import CheckpointReader
from m6.checkpoints.provenance import InitialRun, initial_of, trained_objectives
from m6.config.run import RunConfig
from m6.data.manifest import SPLITS, Manifest
from m6.data.overlap import describe_shared
from m6.data.sources import BUILT_IN
from m6.decoding import TEMPERATURE
from m6.formatting import markdown_table, perplexity
from m6.model import num_parameters
from m6.runs.data import kept_sources
from m6.runs.directory import RunDirectory
from m6.runs.provenance import Attempt, read_attempts

_DRAWING = (
    f"Unless told otherwise it draws at temperature {TEMPERATURE}, the `code_temperature` of `generation_config.json`. "
    "Captions with words, or an order of them, that no training caption has get a warning by `captions.json`."
)


def model_card(
    run_dir: Path, config: RunConfig, reader: CheckpointReader, dtype: str, licence: str | None = None
) -> ModelCard:
    """Makes the README.md of an exported model, with the header for the Hub.

    Args:
        run_dir: the run.
        config: of the run.
        reader: of the exported checkpoint.
        dtype: type of the exported weights.
        licence: of the weights, by its name on the Hub; None: not stated.

    Raises:
        UserError: a record of the run is damaged.
    """
    name = run_dir.absolute().name
    sources, initial = kept_sources(run_dir), initial_of(run_dir, config)
    before = initial.lineage() if initial else []
    every = [sources, *(run.sources for run in before)]
    sections = {
        name: _summary(config),
        "How to load it": _loading(config),
        "Model": _model(config, dtype),
        "Training data": _data(sources),
        "Training": _training(run_dir, config, reader),
        **{f"Before: {run.name}": _before(run) for run in before},
        "Validation": _validation(run_dir, reader.state["step"]),
        "Limits": _limits(config, sources),
        "Licence": _licence(every, licence),
    }
    first, *others = sections
    text = f"# {first}\n\n{sections[first]}\n" + "".join(f"\n## {title}\n{sections[title]}\n" for title in others)
    return ModelCard(f"---\n{_header(config, every, licence).to_yaml()}\n---\n\n{text}")


def _header(config: RunConfig, every: Sequence[Manifest | None], licence: str | None) -> ModelCardData:
    entries = {name: entry for sources in every if sources for name, entry in sources.sources.items()}
    origins = [origin.package for entry in entries.values() for origin in entry.origin]
    datasets = [package.split(":")[1] for package in origins if package.startswith("hf:")]
    # All built-in sources are Chinese; the language of a user's own data is not recorded.
    chinese = None not in every and entries.keys() <= BUILT_IN.keys()
    return ModelCardData(
        license=licence or "unknown",
        language="zh" if chinese else None,
        library_name="transformers",
        pipeline_tag="image-text-to-text",
        tags=["m6", "multimodal", *(["mixture-of-experts"] if config.model.moe else []), "custom_code"],
        datasets=sorted(set(datasets)) or None,
    )


def _summary(config: RunConfig) -> str:
    counts = num_parameters(config.model)
    writes = "text and image codes" if config.m6.objectives.decodings else "text"
    kind = "mixture of experts" if config.model.moe else "dense transformer"
    return (
        f"An M6 model ([arXiv 2103.00823](https://arxiv.org/abs/2103.00823)) that reads pictures and text and writes "
        f"{writes}: a {kind} with {counts['total']:,} parameters, of which a token uses "
        f"{counts['active_per_token']:,}. It was trained with m6-recipes, which wrote this card from the run's records."
    )


def _loading(config: RunConfig) -> str:
    text = """```python
from PIL import Image
from transformers import pipeline

describe = pipeline("image-text-to-text", model="FOLDER_OR_NAME", trust_remote_code=True)
print(describe(images=Image.open("picture.png"), text="", max_new_tokens=16, return_full_text=False))
```
`trust_remote_code` runs the Python files of this folder; they need torch, transformers, sentencepiece and pillow."""
    if config.m6.objectives.decodings:
        text += (
            " Drawing pictures needs m6-recipes: `M6TextToImagePipeline.from_pretrained(FOLDER)`, or "
            f"`m6 generate --checkpoint FOLDER --captions captions.txt --out grid.png`. {_DRAWING}"
        )
    return text


def _model(config: RunConfig, dtype: str) -> str:
    model, counts = config.model, num_parameters(config.model)
    rows = [
        ["parameters", f"{counts['total']:,}"],
        ["active per token", f"{counts['active_per_token']:,}"],
        ["layers x hidden x FFN", f"{model.num_layers} x {model.hidden_size:,} x {model.ffn_hidden_size:,}"],
        ["attention heads", f"{model.num_attention_heads}"],
    ]
    if model.moe is not None:
        moe = model.moe_config()
        rows += [
            [
                "experts of a sparse layer (prototypes x top-k)",
                f"{moe.num_experts} ({moe.num_prototypes} x {moe.top_k})",
            ],
            ["sparse layers", f"{model.num_moe_layers}"],
        ]
        if moe.capacity_factor is not None and (expected := config.expected_routing) is not None:
            left = f"{expected.experts_per_token:.3g} of {moe.experts_per_token} (expected of a balanced router)"
            rows.append(["experts that the training's capacity left to a token", left])
    rows += [
        ["vocabulary", f"{model.text_vocab_size:,} text pieces and {model.image_vocab_size:,} image codes"],
        [
            "picture",
            f"{model.image_size} x {model.image_size} pixels, {model.num_patches} patches, {model.patch_encoder}",
        ],
        ["weights", dtype],
    ]
    return markdown_table(["", "value"], rows)


def _data(sources: Manifest | None) -> str:
    if sources is None:
        return "Unknown: the run did not record its sources."
    rows = [
        [
            name,
            entry.kind,
            *(f"{sources.split(name, split).rows:,}" for split in SPLITS),
            f"{sum(split.bytes for split in entry.splits.values()) / 1e6:,.1f}",
            entry.licence,
            ", ".join(f"{origin.package} {origin.version}" for origin in entry.origin),
        ]
        for name, entry in sources.sources.items()
    ]
    header = ["source", "kind", "rows: train", "validation", "test", "MB", "licence", "made from"]
    shared = describe_shared(sources, sources.sources, SPLITS)
    return "\n\n".join(filter(None, [markdown_table(header, rows, "llrrrrll"), shared]))


def _training(run_dir: Path, config: RunConfig, reader: CheckpointReader) -> str:
    state, settings = reader.state, config.m6
    rows = [
        ["objectives and their weights", _objectives(trained_objectives(config))],
        ["steps", f"{state['step']:,} of {settings.training.total_steps:,}"],
        ["samples and tokens seen", f"{state['samples_seen']:,} and {state['tokens_seen']:,}"],
        ["samples of a step", f"{config.document['train_batch_size']:,}"],
        ["tokens of a row", f"{settings.data.sequence_length:,}"],
        ["precision", _precision(config)],
        ["optimizer", f"{config.document['optimizer']['type']}, {_learning_rate(config)}"],
        ["layout", _layout(config)],
        ["seed", f"{settings.training.seed}"],
    ]
    if settings.init is not None:
        rows.append(["initial weights", f"of {settings.init.name}, see below"])
    if settings.lora is not None:
        lora = settings.lora
        rows.append(
            [
                "adapters",
                f"LoRA of {', '.join(lora.targets)}, rank {lora.rank}, alpha {lora.alpha:g}; in the weights here",
            ]
        )
    if settings.pseudo_to_real is not None:
        rows.append(["first stage", "layers share weights (Pseudo-to-Real, arXiv 2110.03888)"])
    if attempts := read_attempts(run_dir):
        rows += _attempts(attempts)
    return markdown_table(["", "value"], rows)


def _before(run: InitialRun) -> str:
    if run.steps is None:
        return "Unknown: no record of its data, their licences and its training was kept."
    rows = [
        ["objectives and their weights", _objectives(run.objectives)],
        ["steps", f"{run.steps:,}"],
        ["samples and tokens seen", f"{run.samples_seen:,} and {run.tokens_seen:,}"],
    ]
    return f"{markdown_table(['', 'value'], rows)}\n\n{_data(run.sources)}"


def _precision(config: RunConfig) -> str:
    autocast = config.document.get("torch_autocast") or {}
    if not autocast.get("enabled"):
        return config.deepspeed.precision
    return f"{config.deepspeed.precision}, with products in {autocast['dtype']} (autocast)"


def _learning_rate(config: RunConfig) -> str:
    schedule = config.m6.schedule
    rate = config.document["optimizer"]["params"].get("lr")
    peak = "unknown" if rate is None else f"{rate:g}"
    return f"peak learning rate {peak}, steps of warm-up: {schedule.warmup_steps:,}, then {schedule.decay}"


def _layout(config: RunConfig) -> str:
    training = config.m6.training
    parts = [
        f"ZeRO stage {config.deepspeed.zero_stage}",
        f"micro-batches of {config.deepspeed.micro_batch_size}",
        f"experts divided over {training.ep_size} ranks" if training.ep_size > 1 else "",
        "activation checkpointing" if training.activation_checkpointing else "",
        "experts in host memory" if config.m6.offload is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _attempts(attempts: list[Attempt]) -> list[list[str]]:
    """Rows about the time, hardware and software of the training; without names of hosts and folders."""
    last = attempts[-1]
    machines = list(dict.fromkeys(f"{each.world_size} x {each.hardware}" for each in attempts))
    packages = ", ".join(f"{name} {last.version(name)}" for name in ("torch", "deepspeed", "transformers"))
    return [
        ["trained since", f"{attempts[0].time}, in {len(attempts)} attempt{'s' * (len(attempts) > 1)}"],
        ["ranks x hardware of the first rank", "; ".join(machines)],
        ["software", f"m6-recipes {m6.__version__} (commit {last.git_commit or 'unknown'}), {packages}"],
    ]


def _validation(run_dir: Path, step: int) -> str:
    run = RunDirectory(run_dir)
    entries = run.read_metrics() if run.metrics.exists() else []
    measured = [entry for entry in entries if "validation" in entry and entry["step"] <= step]
    if not measured:
        return "Unknown: the run recorded no validation."
    last = measured[-1]
    rows = [
        [name, "not finite", ""] if loss is None else [name, f"{loss:.3f}", f"{perplexity(loss):,.3f}"]
        for name, loss in last["validation"].items()
    ]
    by_source = [
        [name, source, "not finite" if loss is None else f"{loss:.3f}"]
        for name, losses in last.get("validation_by_source", {}).items()
        for source, loss in losses.items()
    ]
    parts = [
        f"At step {last['step']:,}, in nats per target token, on the validation split of the data.",
        markdown_table(["objective", "loss", "perplexity"], rows),
    ]
    if by_source:
        parts.append(markdown_table(["objective", "source", "loss"], by_source, "llr"))
    return "\n\n".join(parts)


def _limits(config: RunConfig, sources: Manifest | None) -> str:
    model = config.model
    lines = [
        "The run measured only the validation above: nothing is known about errors, bias or harm in what it writes.",
        "A prompt holds at most one picture, then text, then `<bos>`; there is no chat format.",
        f"Text and target have at most {model.max_position_embeddings} tokens each.",
    ]
    if config.m6.objectives.decodings:
        guess = math.log(model.image_vocab_size // model.codes_per_place)
        lines.append(
            "It draws what its training captions name. A code that is guessed costs "
            f"{guess:.2f} nats: a source whose loss of drawing, above, is near that has concepts that it cannot draw."
        )
    validation = [sources.split(name, "validation").shared for name in sources.sources] if sources else []
    if any(shared and shared.rows for shared in validation):
        lines.append("Some validation rows are also in training, as counted above: the losses measure memory in part.")
    return "\n".join(f"- {line}" for line in lines)


def _licence(every: Sequence[Manifest | None], licence: str | None) -> str:
    stated = {entry.licence for sources in every if sources for entry in sources.sources.values()}
    data = ", ".join([*sorted(stated), *(["unknown"] if None in every else [])])
    return (
        f"Of the weights: {licence or 'not stated by the run; whoever publishes them decides'}. Of the data: {data}. "
        "Of the Python files of this folder: Apache-2.0."
    )


def _objectives(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
