"""The same run on other layouts: ranks, ZeRO stages and expert parallelism must not change what is learned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.spawn import run_distributed
from tests.fixtures.tiny_run import tiny_document

# fp32 sums in another order: the losses are near 6, so 1e-5 relative is about a hundred units in the last place.
TOLERANCE = 1e-5

# (ranks, ZeRO stage, ep_size)
LAYOUTS = [
    (2, 0, 1),
    (2, 1, 1),
    (2, 3, 1),
    (2, 1, 2),
    (2, 2, 2),
    (4, 2, 2),
    (4, 1, 4),
]


def train(document: dict[str, Any], root: str, stop_at: int | None = None) -> None:
    """One attempt at a run; called on every rank. Stops after ``stop_at`` steps in all."""
    from m6.config.run import parse_config
    from m6.planning.prediction import RunForecast
    from m6.runs.directory import RunDirectory
    from m6.runs.processes import start
    from m6.training.loop import Trainer

    runtime = start()
    config, run = parse_config(document), RunDirectory(Path(root))
    if runtime.is_main:
        run.open(config, runtime.world_size)
    torch.distributed.barrier()
    trainer = Trainer(config, run, runtime, forecast=RunForecast(run.root, config, runtime.world_size))
    trainer.train(stop_after=stop_at)


def layout(folder: Path, ranks: int, stage: int, ep_size: int, **changes: Any) -> dict[str, Any]:
    document = tiny_document(folder, m6__training__ep_size=ep_size, **changes)
    document["zero_optimization"] = {"stage": stage}
    return document


def losses(root: Path) -> list[float]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    values = [line["loss"] for line in lines if "loss" in line]
    return values + [value for line in lines if "validation" in line for value in line["validation"].values()]


def norms(root: Path) -> list[float]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [line["grad_norm"] for line in lines if "grad_norm" in line]


def noise(root: Path) -> list[float]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [value for line in lines if "gradient_noise" in line for value in line["gradient_noise"].values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Path:
    root = folder / "reference"
    run_distributed(train, 1, layout(folder, 1, 0, 1), str(root))
    return root


def test_losses_are_the_recorded_ones(reference: Path):
    """A change that is meant to change them records the new ones: the failing comparison prints them.

    The tolerance allows for other processors' order of summation over four steps.
    """
    recorded = json.loads((Path(__file__).parents[1] / "golden" / "tiny_losses.json").read_text())
    assert losses(reference) == pytest.approx(recorded, rel=1e-4)


@pytest.mark.parametrize(
    ("ranks", "stage", "ep_size"),
    [pytest.param(*layout, marks=() if layout == (2, 1, 2) else pytest.mark.slow) for layout in LAYOUTS],
)
def test_losses_do_not_depend_on_the_layout(folder: Path, reference: Path, ranks: int, stage: int, ep_size: int):
    root = folder / f"run_{ranks}_{stage}_{ep_size}"
    run_distributed(train, ranks, layout(folder, ranks, stage, ep_size), str(root))
    assert losses(root) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(reference), rel=10 * TOLERANCE)
    if ep_size == 1:  # experts that are split get gradients of other ranks' samples: no estimate
        assert noise(root) == pytest.approx(noise(reference), rel=100 * TOLERANCE)
    else:
        assert noise(root) == []


def test_rows_in_float8_both_ways_train_alike(folder: Path, reference: Path):
    """Four steps: each row is off by up to 2^-4 of its numbers, the losses near 6 by far less."""
    root = folder / "float8_both"
    dispatch_dtype = {"m6__moe__dispatch_dtype": "float8_both", "m6__moe__exchange": "all_to_all"}
    run_distributed(train, 2, layout(folder, 2, 1, 2, **dispatch_dtype), str(root))
    assert losses(root) == pytest.approx(losses(reference), rel=5e-3)
    assert losses(root) != pytest.approx(losses(reference), rel=TOLERANCE)  # it did round


ROUTING = {
    "num_experts": 4,
    "num_prototypes": 2,
    "gating": "sigmoid",
    "normalize_gates": True,
    "capacity_factor": 1.0,
    "drop_order": "probability",
    "activation": "swiglu",
    "bias": True,
    "num_shared_experts": 1,
    "shared_expert_gate": True,
    "balance_bias_rate": 0.01,
    "z_loss_weight": 0.001,
    "recompute_activation": True,
}


@pytest.mark.slow
def test_options_of_the_experts_do_not_depend_on_the_layout(folder: Path):
    """Balancing biases, shared experts and expert biases on one rank, and on 2, then 4 ranks that share experts."""
    run_distributed(train, 1, layout(folder, 1, 0, 1, m6__moe=ROUTING), str(folder / "options"))
    root = folder / "options_wandering"
    for ranks, stage, ep_size, stop_at in [(2, 2, 2, 2), (4, 1, 2, None)]:
        run_distributed(train, ranks, layout(folder, ranks, stage, ep_size, m6__moe=ROUTING), str(root), stop_at)
    assert losses(root) == pytest.approx(losses(folder / "options"), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(folder / "options"), rel=10 * TOLERANCE)


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01, "weight_decay": 0.1}}}


def test_muon_does_not_depend_on_the_layout(folder: Path):
    """Partitions that cut matrices, also those of experts, and the momentum in checkpoints of other layouts."""
    run_distributed(train, 1, layout(folder, 1, 0, 1, **MUON), str(folder / "muon"))
    root = folder / "muon_wandering"
    for ranks, stage, ep_size, stop_at in [(2, 1, 1, 1), (2, 0, 2, 2), (4, 2, 2, 3), (1, 1, 1, None)]:
        run_distributed(train, ranks, layout(folder, ranks, stage, ep_size, **MUON), str(root), stop_at)
    assert losses(root) == pytest.approx(losses(folder / "muon"), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(folder / "muon"), rel=10 * TOLERANCE)


LARGE_BATCH: dict[str, dict[str, float]] = {
    "Lamb": {"lr": 0.01, "weight_decay": 0.1},
    "Lars": {"lr": 2.0, "weight_decay": 0.001, "trust_coefficient": 0.01},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_BATCH)
def test_optimizers_for_large_batches_do_not_depend_on_the_layout(folder: Path, name: str):
    """Norms of tensors, and of each expert, that partitions cut; the moments in checkpoints of other layouts."""
    changes = {"optimizer": {"type": name, "params": LARGE_BATCH[name]}}
    run_distributed(train, 1, layout(folder, 1, 0, 1, **changes), str(folder / name))
    root = folder / f"{name} wandering"
    for ranks, stage, ep_size, stop_at in [(2, 1, 1, 1), (2, 0, 2, 2), (4, 2, 2, 3), (1, 1, 1, None)]:
        run_distributed(train, ranks, layout(folder, ranks, stage, ep_size, **changes), str(root), stop_at)
    assert losses(root) == pytest.approx(losses(folder / name), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(folder / name), rel=10 * TOLERANCE)
    assert losses(root)[-1] < losses(root)[0]  # it learns


@pytest.mark.slow
def test_a_run_resumes_on_other_layouts(folder: Path, reference: Path):
    root = folder / "wandering"
    by_prototypes = {"m6__moe__exchange": "prototype", "m6__moe__ranks_per_node": 2, "m6__moe__overlap_parts": 3}
    for ranks, stage, ep_size, stop_at, changes in [
        (2, 2, 2, 1, {"m6__moe__exchange": "all_to_all"}),
        (4, 1, 4, 2, by_prototypes),
        (2, 3, 1, 3, {}),
        (1, 0, 1, None, {}),
    ]:
        run_distributed(train, ranks, layout(folder, ranks, stage, ep_size, **changes), str(root), stop_at)
    assert losses(root) == pytest.approx(losses(reference), rel=TOLERANCE)
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    sent = [line["experts"].get("sent_bytes") for line in lines if "experts" in line]
    assert sent[0]["within_nodes"] > 0 == sent[0]["between_nodes"]
    assert sent[1]["within_nodes"] > 0 < sent[1]["between_nodes"]
    assert sent[2:] == [None, None]
