"""A run folder with a real checkpoint, written without training."""

import json
from pathlib import Path
from typing import Any

import torch

from m6.checkpoints.format import CheckpointReader, write_manifest, write_shards
from m6.checkpoints.fragment import Fragment
from m6.config.run import load_config
from m6.model import M6ForConditionalGeneration, initialize_parameters
from m6.tokenizers.text import load_text_tokenizer
from tests.fixtures.tiny_run import document_over


def run_document(data: Path, tokenizer: Path, **model: Any) -> dict[str, Any]:
    """The JSON of a run on the tiny data, with settings of the model."""
    changes: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4,
        "m6__model__hidden_dropout": 0.0,
        "m6__model__max_position_embeddings": 96,
        "m6__data__sequence_length": 96,
        "m6__training": {"total_steps": 100, "seed": 5},
    }
    return document_over(data, tokenizer, **changes, **{f"m6__model__{key}": value for key, value in model.items()})


def write_run(run: Path, document: dict[str, Any]) -> M6ForConditionalGeneration:
    """Writes config.json and one checkpoint, in uneven pieces of two ranks; returns the model that it holds."""
    run.mkdir()
    (run / "config.json").write_text(json.dumps(document))
    config = load_config(run / "config.json")
    model = M6ForConditionalGeneration(config.model)
    initialize_parameters(model, seed=3)
    folder = run / "checkpoints" / "step_00000100"
    folder.mkdir(parents=True)
    pieces: list[list[Fragment]] = [[], []]
    for name, tensor in model.state_dict().items():
        flat, cut, shape = tensor.reshape(-1), tensor.numel() // 3, tuple(tensor.shape)
        for rank, (begin, end) in enumerate([(0, cut), (cut, tensor.numel())]):
            pieces[rank].append(Fragment(name, "weight", begin, flat[begin:end].clone(), shape))
            pieces[rank].append(Fragment(name, "exp_avg", begin, torch.zeros(end - begin), shape))
    for rank in (0, 1):
        write_shards(folder, rank, pieces[rank])
    fingerprint = load_text_tokenizer(config.m6.data.tokenizer).fingerprint
    state = {
        "step": 100,
        "optimizer_step": 100,
        "samples_seen": 400,
        "tokens_seen": 12000,
        "tokenizer": fingerprint,
    }
    write_manifest(folder, 2, state)
    return model.eval()


def change_state(run: Path, **changes: Any) -> Path:
    """Changes the training state in the checkpoint that :func:`write_run` wrote; returns the checkpoint's folder."""
    folder = run / "checkpoints" / "step_00000100"
    write_manifest(folder, 2, {**CheckpointReader(folder).state, **changes})
    return folder


def training_entry(step: int, objectives: dict[str, float], **changes: Any) -> dict[str, Any]:
    """A training line of metrics.jsonl."""
    return {
        "step": step,
        "time": 1.7e9 + step,
        "samples_seen": 4 * step,
        "tokens_seen": 120 * step,
        "loss": 5.0,
        "aux_loss": 0.01,
        "objectives": objectives,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "skipped_steps": 0,
        "bad_rows": 0,
        "step_time_s": 0.1,
        "data_wait_s": 0.002,
        "checkpoint_stall_s": 0.001,
        "tokens_per_second": 1200.0,
        "samples_per_second": 40.0,
        "model_flops_per_second": 2e9,
        "mfu": 0.25,
        "memory_bytes": 3 << 29,
        **changes,
    }


def write_metrics(run: Path, entries: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
