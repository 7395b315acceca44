"""Baselines: the loss of n-gram models on the targets of the validation rows."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from m6.architecture.settings import ModelSettings
from m6.config.run import RunConfig
from m6.data.collate import IGNORED_LABEL, MicroBatch
from m6.data.manifest import MANIFEST_NAME
from m6.data.objectives import is_in_place, source_kind
from m6.data.pretraining import PretrainingData
from m6.data.weights import source_weights
from m6.errors import UserError
from m6.evaluation.ngram import Floats, Ints, NGramCounts, NGramModel
from m6.files import parse_object, sha256, write_json
from m6.runs.data import open_data

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
ORDERS = {"unigram": 1, "bigram": 2, "5-gram": 5}
Baselines = dict[str, dict[str, float]]


def baselines_file(run_dir: Path) -> Path:
    """Returns the path of a run's stored baselines."""
    return run_dir / "baselines.json"


def run_baselines(run_dir: Path, config: RunConfig, num_rows: int) -> Baselines:
    """Returns the baselines of a run, stored in RUN/baselines.json and recomputed only if an input has changed.

    If the folder is read-only, they are not stored, and a warning says so.

    Args:
        run_dir: folder of the run.
        config: configuration of the run.
        num_rows: validation rows per objective.

    Returns:
        {objective: {model of ``orders``: mean loss in nats per target}} for every objective with validation data.
    """
    data = open_data(config)
    inputs = _inputs(config, data, num_rows)
    file = baselines_file(run_dir)
    stored = _read(file)
    if stored is not None and stored["made_from"] == inputs:
        return stored["losses"]
    losses = compute_baselines(config, data, num_rows)
    try:
        write_json(file, {"made_from": inputs, "losses": losses})
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        print(f"warning: {file} cannot be written, so the baselines are computed again next time", file=sys.stderr)
    return losses


def read_baselines(run_dir: Path) -> Baselines:
    """Returns the stored baselines of a run; empty if there are none."""
    stored = _read(baselines_file(run_dir))
    return {} if stored is None else stored["losses"]


def compute_baselines(
    config: RunConfig, data: PretrainingData, num_rows: int, held_out: PretrainingData | None = None
) -> Baselines:
    """Trains n-gram models on each objective's training targets and evaluates them on its validation rows.

    With ``held_out``, rows of its split take the place of the validation rows.

    Every training row of the objective's sources is used once; the sources' weights in the mixture are ignored. The
    n-gram models have the vocabulary of the run's model, so the losses are comparable. The loss of the run's model is
    normalised within the codebook of each position (:mod:`m6.model.outputs`). The unigram model does not see positions,
    so its loss is normalised within the codebook in the same way.
    """
    losses: Baselines = {}
    for objective in (held_out or data).active_objectives:
        if held_out is None:
            batches = data.validation_micro_batches(objective, num_rows)
        else:
            batches = held_out.validation_micro_batches(objective, num_rows, held_out.split)
        evaluated = batch_targets(batches, data.tokenizer.bos_token_id)
        if not evaluated:  # no usable validation rows
            continue
        targets = training_targets(config, data, objective)
        counts = NGramCounts(targets, max(ORDERS.values()), config.model.vocab_size)
        own = losses[objective] = {}
        for name, order in orders(objective).items():
            model = NGramModel(counts, order)
            own[name] = model.mean_loss(evaluated)
            if order == 1:
                tokens = np.concatenate([ids[1:] for ids in evaluated])
                own[name] += float(_log_book_masses(model, config.model)[tokens].mean())
    return losses


def _log_book_masses(unigram: NGramModel, config: ModelSettings) -> Floats:
    """Log probability in nats of each token's codebook, [V]; 0 for text, normalised over all tokens."""
    if not config.image_vocab_size:
        return np.zeros(config.vocab_size)
    pairs = [np.array([config.bos_token_id, token]) for token in range(config.vocab_size)]
    each = np.exp(unigram.log_probabilities(pairs))
    books = each[config.first_code_id :].reshape(config.codes_per_place, config.codebook_size).sum(axis=1)
    return np.concatenate([np.zeros(config.first_code_id), np.log(books).repeat(config.codebook_size)])


def orders(objective: str) -> dict[str, int]:
    """The n-gram models of an objective. In place only unigrams are used: neighbours of a target may be hidden too."""
    return {"unigram": 1} if is_in_place(objective) else ORDERS


def training_targets(config: RunConfig, data: PretrainingData, objective: str) -> list[Ints]:
    """Returns ``[bos] + ids + [eos]`` for every training row of the objective's sources, cut as in training."""
    tokenizer = data.tokenizer
    return [
        np.array([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
        for source in source_weights(data.manifest, "train", config.m6.data.sources)
        if data.manifest.sources[source].kind == source_kind(objective)
        for ids in data.target_ids(objective, source, "train")
    ]


def batch_targets(batches: Iterable[MicroBatch], bos_token_id: int) -> list[Ints]:
    """Returns ``[bos] + labels``, in their order, for every sample of the micro-batches."""
    targets = []
    for batch in batches:
        row, column = (batch.labels != IGNORED_LABEL).numpy().nonzero()
        # A change of row or sample id begins a new sample. Targets in place need not be neighbours, see ``orders``.
        samples = np.stack([row, batch.sample_ids.numpy()[row, column]])
        begins = np.flatnonzero((np.diff(samples, axis=1) != 0).any(axis=0)) + 1
        for labels in np.split(batch.labels.numpy()[row, column], begins):
            if len(labels):
                targets.append(np.concatenate([[bos_token_id], labels]))
    return targets


def _inputs(config: RunConfig, data: PretrainingData, num_rows: int) -> dict[str, Any]:
    settings = config.m6
    # If an input were missing here, stale baselines would stay in use.
    return {
        "manifest": sha256(data.manifest.folder / MANIFEST_NAME),
        **data.tokenizer_identities,
        "objectives": settings.objectives.model_dump(mode="json"),
        "orders": {objective: list(orders(objective)) for objective in data.active_objectives},
        "sources": settings.data.sources,
        "sequence_length": settings.data.sequence_length,
        "num_patches": config.model.num_patches,
        "codes_per_place": config.model.codes_per_place,
        "num_rows": num_rows,
    }


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        content = parse_object(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file}: corrupt: {error}; remove it to compute the baselines again") from None
    if not content.keys() >= {"made_from", "losses"}:
        raise UserError(f"{file}: holds no baselines; remove it to compute them again")
    return content
