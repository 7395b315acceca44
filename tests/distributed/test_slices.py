"""Slices of rows in a pipeline: losses and gradients are those of whole rows on one rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.config.run import parse_config
from m6.data.collate import MicroBatch
from m6.model.slices import SliceKeys, valid_cuts
from m6.model.stages import ModelStage
from m6.runs.data import open_data
from m6.training.engine import sliced_pipeline as costs
from m6.training.engine.sliced_pipeline import SliceChoice
from m6.training.pass_orders import sliced_orders
from scripts.benchmarks.pipeline_bubbles import recording
from tests.distributed.alike import TOLERANCE, reported
from tests.distributed.spawn import run_distributed
from tests.distributed.test_faults import entries
from tests.distributed.test_pipelines import document, part_of_loss, train_all
from tests.distributed.test_training_layouts import losses, norms, train
from tests.fixtures.tiny_run import tiny_document

pytestmark = pytest.mark.slow

ROUTING = {"num_experts": 4, "num_prototypes": 2, "aux_loss_weight": 0.1, "z_loss_weight": 0.01}
CAPACITY = {"capacity_factor": 0.8, "min_capacity": 1}
WITHOUT_PICTURES = {"image_captioning": {"weight": 0}, "image_text_denoising": {"weight": 0}}
SOURCES = {"language_modelling": {"weight": 0}, **WITHOUT_PICTURES}


def sliced(num_ranks: int, slices: int | str, layers: list[int] | None = None) -> dict[str, Any]:
    section = {"num_ranks": num_ranks, "slices": slices}
    return section if layers is None else {**section, "layers": layers}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    tiny_document(folder)  # builds the data before the ranks start
    return folder


def whole_gradients(model: Any, batches: Sequence[MicroBatch], loss: Any) -> dict[str, torch.Tensor]:
    """Of whole rows in one process."""
    for seed, batch in enumerate(batches):
        output = model(**batch.model_inputs(), labels=batch.labels, return_logits=False, dropout_seed=seed)
        loss(batch, output).backward()
    return taken(model)


def sliced_gradients(model: Any, batches: Sequence[MicroBatch], cuts: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    """Of slices in one process, in the plainest order."""
    from m6.training.engine.sliced_pipeline import slices_of

    layers, table = range(model.config.num_layers), model.model.embeddings.tokens.weight
    stage = ModelStage(model, layers, table).train()
    for number, batch in enumerate(batches):
        keys, found = SliceKeys(batch.sample_ids), []
        for each in slices_of(batch, number, number, cuts[number], model.config):
            past = keys.of_slice(each.begin, each.batch.sample_ids.shape[1])
            _, output = stage(None, each.batch.model_inputs(), each.batch.labels, each.seed, past)
            found.append(part_of_loss(each.batch, output))
        for loss in reversed(found):
            loss.backward()
    return taken(model)


def taken(model: Any) -> dict[str, torch.Tensor]:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def largest_error(engine: Any, expected: dict[str, torch.Tensor]) -> float:
    """Over the parameters of all ranks, relative to the largest element of each."""
    errors = [
        (parameter.grad - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-12)
        for name, parameter in engine.module.named_parameters()
    ]
    largest = torch.stack(errors).max()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return float(largest)


def compare(exact: dict[str, Any], texts: dict[str, Any], noisy: dict[str, Any]) -> None:
    """On each of two ranks: gradients of its stage against those of the whole model in one process."""
    from m6.runs.processes import start
    from m6.training.engine.build import build_engine, build_model

    runtime = start()
    costs._FLOPS_PER_BYTE = 1  # else "auto" would not cut such short rows

    def gradients(base: dict[str, Any], slices: int | str, checkpointing: bool = False) -> Any:
        training = {**base["m6"]["training"], "activation_checkpointing": checkpointing}
        parallel = {"pipeline": sliced(2, slices, [3, 2])}
        config = parse_config({**base, "m6": {**base["m6"], "parallel": parallel, "training": training}})
        engine = build_engine(config, runtime)
        engine.begin_step(0.0)
        with recording() as passes:
            engine.accumulate(batches, part_of_loss, range(len(batches)))
        return engine, passes

    def cuts_of(base: dict[str, Any], slices: int | str) -> list[list[int]]:
        parallel = {"pipeline": sliced(2, slices)}
        choice = SliceChoice(parse_config({**base, "m6": {**base["m6"], "parallel": parallel}}), len(batches))
        return [choice.cuts(batch) for batch in batches]

    data = open_data(parse_config(exact))
    batches = [data.micro_batch(index) for index in range(4)]
    whole, _ = build_model(parse_config(exact), runtime.device)
    expected = whole_gradients(whole.train(), batches, part_of_loss)
    for slices in (2, 5, "auto"):
        numbers = [len(each) + 1 for each in cuts_of(exact, slices)]
        assert max(numbers) > 1, slices
        for checkpointing in (False, True):
            engine, passes = gradients(exact, slices, checkpointing)
            assert largest_error(engine, expected) < TOLERANCE, slices
            assert tuple(passes) == sliced_orders(2, tuple(numbers))[runtime.rank]

    # Fewer micro-batches than ranks.
    batches = batches[:1]
    expected = whole_gradients(whole, batches, part_of_loss)
    assert largest_error(gradients(exact | {"train_batch_size": 4}, 4)[0], expected) < TOLERANCE

    # A cut that the mask forbids, inside of a source: the test would see it.
    batches = [open_data(parse_config(texts)).micro_batch(index) for index in range(4)]
    assert not any(3 in valid_cuts(batch.token_type_ids, batch.sample_ids) for batch in batches)
    expected = whole_gradients(whole, batches, part_of_loss)
    honest, SliceChoice.cuts = SliceChoice.cuts, lambda self, batch: [3]
    error = largest_error(gradients(texts, 2)[0], expected)
    assert error > 1e-3, error
    SliceChoice.cuts = honest

    # Dropout and the noise of routers depend on the slices, but not on the stages.
    batches = [data.micro_batch(index) for index in range(4)]
    whole, _ = build_model(parse_config(noisy), runtime.device)
    expected = sliced_gradients(whole, batches, cuts_of(noisy, 3))
    assert largest_error(gradients(noisy, 3)[0], expected) < TOLERANCE


def test_slices_have_the_gradients_of_whole_rows(folder: Path):
    changes = {
        "train_micro_batch_size_per_gpu": 4,
        "m6__model__rotary_base": 100.0,
        "m6__model__initializer_range": 0.1,
    }
    exact = document(folder, m6__moe=ROUTING, m6__model__hidden_dropout=0.0, **changes)
    noisy = document(folder, m6__moe__router_jitter=0.1, m6__model__attention_dropout=0.1, **changes)
    texts = document(folder, m6__moe=ROUTING, m6__model__hidden_dropout=0.0, m6__objectives=SOURCES, **changes)
    run_distributed(compare, 2, exact, texts, noisy)


# name -> (changes of the run, slices and ranks of its pipeline, ZeRO stage, ep_size) on 4 ranks
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    # Ranks that exchange tokens have rows that may be cut into different numbers of slices, see the test.
    "experts": (
        {"m6__moe": {**ROUTING, "balance_bias_rate": 0.01}},
        sliced(2, 12, [3, 2]),
        1,
        2,
    ),
    "a capacity": (
        {"m6__moe": {**ROUTING, **CAPACITY, "top_k": 2, "drop_order": "causal", "capacity_rounding": "random"}},
        sliced(2, 4),
        1,
        2,
    ),
    "a capacity by position": (
        {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8, "m6__moe": {**ROUTING, **CAPACITY}},
        sliced(2, 3),
        0,
        1,
    ),
    "fewer micro-batches than ranks": ({"train_batch_size": 4, "m6__moe": None}, sliced(4, 3), 0, 1),
    "bf16": ({"m6__moe": ROUTING, "bf16": {"enabled": True}}, sliced(2, 3), 1, 2),
}


def test_a_run_of_slices_reports_what_one_rank_reports(folder: Path):
    """Losses, validation, norms, counts, and the statistics of the routers."""
    alone, together = [], []
    for name, (changes, pipeline, zero, ep_size) in RUNS.items():
        changes = {**changes, "m6__model__hidden_dropout": 0.0, "m6__training__total_steps": 2}
        parallel = {"m6__parallel__pipeline": pipeline, "m6__training__ep_size": ep_size}
        alone.append((document(folder, 1 if name == "bf16" else 0, **changes), folder / f"{name} alone"))
        together.append((document(folder, zero, **changes, **parallel), folder / name))
    # The loads of micro-batches at the same time are known with the last slices of both pipelines.
    for name, stages in (("global batch alone", {"num_ranks": 2, "schedule": "1f1b"}), ("global batch", sliced(2, 3))):
        changes = {"m6__moe": {**ROUTING, "balance_scope": "global_batch"}, "m6__model__hidden_dropout": 0.0}
        steps = {"m6__training__total_steps": 2, "m6__training__activation_checkpointing": True}
        # The ranks of an exchange of tokens have padding in other slices.
        parallel = {"m6__parallel__pipeline": stages, "m6__training__ep_size": 2}
        together.append((document(folder, **changes, **steps, **parallel), folder / name))
    config = parse_config(together[0][0])
    choice, data = SliceChoice(config, 4), open_data(config)
    # Of the first micro-batches of both pipelines.
    assert len({len(choice.cuts(data.micro_batch(number))) for number in (0, 4)}) == 2
    run_distributed(train_all, 1, alone)
    run_distributed(train_all, 4, together)
    for name in (*RUNS, "global batch"):
        found, expected = folder / name, folder / f"{name} alone"
        rounding = 2e-3 if name == "bf16" else TOLERANCE
        assert losses(found) == pytest.approx(losses(expected), rel=rounding), name
        assert norms(found) == pytest.approx(norms(expected), rel=10 * rounding), name
        counts = ("tokens_seen", "samples_seen", "skipped_steps")
        assert reported(found, *counts) == reported(expected, *counts)
        for ours, theirs in zip(entries(found), entries(expected), strict=True):
            for key in ("load_cv", "unused_experts", "router_entropy", "dropped_fraction", "tokens_without_expert"):
                values, others = (entry.get("experts", {}).get(key, []) for entry in (ours, theirs))
                assert values == pytest.approx(others, abs=1e-5 if rounding == TOLERANCE else 0.1), (name, key)


def test_a_run_resumes_with_other_slices_and_without(folder: Path):
    changes = {"m6__moe": ROUTING, "m6__model__hidden_dropout": 0.0, "m6__training__total_steps": 3}
    run_distributed(train, 1, document(folder, 0, **changes), str(folder / "straight"))
    root = folder / "wandering"
    for ranks, pipeline, stop_at in ((2, sliced(2, 3, [3, 2]), 1), (1, None, 2), (2, sliced(2, "auto", [1, 4]), None)):
        run_distributed(train, ranks, document(folder, **changes, m6__parallel__pipeline=pipeline), str(root), stop_at)
    assert losses(root) == pytest.approx(losses(folder / "straight"), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(folder / "straight"), rel=10 * TOLERANCE)
