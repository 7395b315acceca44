"""Runs with ``m6.communication``: exact where nothing is left out, resumed to the bit, and resharded without a loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.checkpoints.comparison import compare, open_step
from m6.checkpoints.format import WEIGHT, CheckpointReader
from m6.config.run import parse_config
from m6.training.meta_model import build_meta_model
from m6.training.reduction.messages import sent_bytes
from m6.training.reduction.reducer import gradient_tensor
from tests.distributed.chosen import cases
from tests.distributed.spawn import run_distributed
from tests.distributed.test_any_world import train_in_any_precision
from tests.distributed.test_training_layouts import TOLERANCE, layout, losses, norms
from tests.fixtures.plans import predicted_checkpoint

# The tiny model has 5 matrices of at least 1000 elements in each layer, and two in its embeddings.
OPTIONS: dict[str, dict[str, Any]] = {
    "top_k": {"density": 0.05, "warmup_steps": 1},
    "chunks": {"density": 0.5, "chunk_elements": 64},
    "powersgd": {"rank": 2, "warmup_steps": 1},
}


def communication(reducer: str, **changes: Any) -> dict[str, Any]:
    return {"gradients": reducer, "dense_elements": 1000, **OPTIONS[reducer], **changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("communication")


def trained(
    folder: Path, name: str, attempts: list[tuple[int, int, int | None]], ep_size: int = 1, **changes: Any
) -> Path:
    """A run over attempts of (ranks, ZeRO stage, steps in all after which it stops)."""
    root = folder / name
    for ranks, stage, stop_at in attempts:
        document = layout(folder, ranks, stage, ep_size, **changes)
        run_distributed(train_in_any_precision, ranks, document, str(root), stop_at)
    return root


def differences(run: Path, other: Path) -> list[str]:
    return compare(*open_step((run, other), None)).differences


def gradient_bytes(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["gradient_bytes"] for line in lines if "gradient_bytes" in line]


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
DELAY: dict[str, Any] = {"m6__gradient_delay": {"accept_loss": True}}
EXACT: list[Any] = [  # reducer, ranks, ZeRO stage, ep_size, changes
    ("top_k", 4, 0, 1, {}),
    ("chunks", 4, 2, 1, {}),
    ("top_k", 4, 1, 2, {}),
    pytest.param("top_k", 4, 1, 1, BF16, marks=pytest.mark.nightly),
    ("chunks", 2, 1, 1, DELAY),
]


@pytest.mark.slow
@pytest.mark.parametrize(("reducer", "ranks", "stage", "ep_size", "changes"), EXACT)
def test_density_1_is_an_all_reduce_to_the_bit(
    folder: Path, reducer: str, ranks: int, stage: int, ep_size: int, changes: dict[str, Any]
):
    """With clipping, dropout, experts and several micro-batches; on 4 ranks an all-reduce has an order of its own.

    At stage 2 gradients stay whole, so that the sums are those of stage 1.
    """
    name = f"{reducer} {stage} {ep_size} {len(changes)}"
    # Gradients of both runs travel in fp32.
    attempt = ranks, min(stage, 1), None
    plain = trained(folder, f"plain {name}", [attempt], ep_size, communication_data_type="fp32", **changes)
    whole = communication(reducer, density=1.0)
    run = trained(folder, f"whole {name}", [(ranks, stage, None)], ep_size, m6__communication=whole, **changes)
    assert [line for line in differences(run, plain) if not line.startswith("residual_")] == []
    assert losses(run) == losses(plain)
    assert norms(run) == norms(plain)


def straight(folder: Path, reducer: str) -> Path:
    """A run of one attempt, which several tests read."""
    if not (folder / f"{reducer} straight").exists():
        trained(folder, f"{reducer} straight", [(2, 1, None)], m6__communication=communication(reducer))
    return folder / f"{reducer} straight"


@pytest.mark.slow
def test_late_gradients_are_sums_of_what_was_sent(folder: Path):
    """Two steps of a run whose first update comes in the second, with the gradient of the first: one step without
    the delay has the same weights. Residuals and gradients that wait are in the checkpoint."""
    sent = {
        "m6__communication": communication("top_k", warmup_steps=0),
        "m6__checkpoint": {"interval_steps": 1, "keep_last": 9},
    }
    constant = {"m6__schedule__warmup_steps": 0, "m6__schedule__decay": "constant"}
    plain = trained(folder, "sent", [(2, 1, 1)], **sent, **constant)
    late = trained(folder, "sent late", [(2, 1, 1), (2, 1, 2), (2, 1, None)], **sent, **constant, **DELAY)
    readers = [CheckpointReader(run / "checkpoints" / f"step_{step:08d}") for run, step in ((plain, 1), (late, 2))]
    for name in readers[0].names(WEIGHT):
        assert torch.equal(*(reader.read(name, WEIGHT) for reader in readers)), name
    assert differences(late, trained(folder, "sent late at once", [(2, 1, None)], **sent, **constant, **DELAY)) == []


@pytest.mark.parametrize("reducer", [pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS])
def test_a_run_resumes_to_the_bit(folder: Path, reducer: str):
    """Residuals, and the factors of PowerSGD, are in the checkpoint."""
    attempts = [(2, 1, 2), (2, 1, None)]
    resumed = trained(folder, f"{reducer} resumed", attempts, m6__communication=communication(reducer))
    assert differences(resumed, straight(folder, reducer)) == []


def test_bytes_are_those_of_the_closed_form(folder: Path):
    """Beside them the bytes of an all-reduce of all gradients. In the first step of a warm-up both are equal."""
    for reducer in OPTIONS:
        run = straight(folder, reducer)
        document = layout(folder, 2, 1, 1, m6__communication=communication(reducer))
        settings = parse_config(document).m6.communication
        model = build_meta_model(parse_config(document), None)
        tensors = [gradient_tensor(name, each) for name, each in model.named_parameters()]
        whole = sum(tensor.numel for tensor in tensors) * 4.0
        found = gradient_bytes(run)
        assert [each["all_reduce"] for each in found] == [whole] * 4
        due = [sent_bytes(tensors, settings, settings.density_of(step), 2) for step in range(4)]
        assert [each["sent"] for each in found] == pytest.approx(due, rel=1e-12)
        assert due[0] == (whole if settings.warmup_steps else pytest.approx(0.77 * whole, rel=0.05))
        assert due[1] < 0.85 * whole


def test_checkpoints_have_the_bytes_of_the_plan(folder: Path):
    """Residuals are whole on each rank."""
    document = layout(folder, 2, 1, 1, m6__communication=communication("top_k"))
    reader = CheckpointReader(straight(folder, "top_k") / "checkpoints" / "step_00000004")
    written = 4 * sum(math.prod(shape) for shape in reader.shapes.values())
    assert written == pytest.approx(predicted_checkpoint(document, 2), rel=0.01)


def residual_sums(run: Path, step: int) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(run / "checkpoints" / f"step_{step:08d}")
    sums: dict[str, torch.Tensor] = {}
    for name, kind in reader.shapes:
        if kind.startswith("residual_"):
            sums[name] = sums.get(name, 0) + reader.read(name, kind).double()
    return sums


@pytest.mark.slow
def test_a_run_continues_on_other_numbers_of_ranks(folder: Path):
    """4 -> 2 -> 1 ranks: the last attempt has one rank, which sends nothing and so loses nothing."""
    attempts = [(4, 1, 1), (2, 0, 3), (1, 1, None)]
    root = trained(folder, "wandering", attempts, m6__communication=communication("powersgd", warmup_steps=0))
    assert any(total.any() for total in residual_sums(root, 3).values())
    assert not any(total.any() for total in residual_sums(root, 4).values())
    # Another number of ranks leaves out others, so that the losses differ a little.
    assert losses(root) == pytest.approx(losses(straight(folder, "powersgd")), rel=0.02)


def test_stages_0_and_1_sum_alike(folder: Path):
    changes = {"m6__communication": communication("top_k")}
    stage_0 = trained(folder, "top_k stage 0", [(2, 0, None)], **changes)
    assert losses(stage_0) == pytest.approx(losses(straight(folder, "top_k")), rel=TOLERANCE)


def test_nothing_is_lost_when_the_reducer_changes(folder: Path):
    """Without the section the residuals would be lost: one message. A step at density 1 sends them first."""
    changes = {"m6__communication": communication("chunks")}
    root = trained(folder, "given up", [(2, 1, 2)], **changes)
    with pytest.raises(RuntimeError, match=r"holds gradients of .* that were not sent yet"):
        trained(folder, "given up", [(2, 1, None)])
    trained(folder, "given up", [(2, 0, 3)], m6__communication=communication("top_k", density=1.0))
    trained(folder, "given up", [(2, 1, None)])
    assert len(losses(root)) > 4


@pytest.mark.slow
def test_split_experts_are_summed_whole(folder: Path):
    """ep_size 2 on 4 ranks: the other gradients are compressed, the experts have no residual, but their bytes count."""
    changes = {"m6__communication": communication("top_k", density=0.2)}
    run = trained(folder, "split", [(4, 1, None)], ep_size=2, **changes)
    names = residual_sums(run, 4)
    assert "model.layers.0.attention.qkv.weight" in names
    assert not any("experts" in name for name in names)

    config = parse_config(layout(folder, 4, 1, 1, **changes))  # of all experts
    parameters = list(build_meta_model(config, None).named_parameters())
    tensors = [gradient_tensor(name, each) for name, each in parameters if ".experts." not in name]
    split = sum(each.numel() for name, each in parameters if ".experts." in name) / 2
    of_experts = split * 4.0  # a ring of the two ranks with the same experts
    due = [sent_bytes(tensors, config.m6.communication, density, 4) + of_experts for density in (1.0, 0.2, 0.2, 0.2)]
    found = gradient_bytes(run)
    assert [each["sent"] for each in found] == pytest.approx(due, rel=1e-12)
    assert [each["all_reduce"] for each in found] == pytest.approx([due[0]] * 4, rel=1e-12)


@pytest.mark.slow
def test_offloaded_experts(folder: Path):
    """Experts of m6.offload are summed by their store; the rest is compressed."""
    streamed = {"chunk_mib": 0.001, "rules": [{"kind": "expert", "place": "stream"}], "device_budget_mib": 5000.0}
    document: dict[str, Any] = {"m6__offload": streamed, "m6__moe": {"num_experts": 4, "num_prototypes": 2}}
    plain = trained(folder, "offloaded plain", [(2, 1, None)], **document)
    whole = communication("top_k", density=1.0)
    run = trained(folder, "offloaded", [(2, 1, None)], m6__communication=whole, **document)
    assert losses(run) == losses(plain)
    sparse = communication("top_k", density=0.2)
    run = trained(folder, "offloaded sparse", [(2, 1, 2), (2, 0, None)], m6__communication=sparse, **document)
    assert losses(run) == pytest.approx(losses(plain), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stages"), [(2, None), (4, {"num_ranks": 2})], ids=["whole", "stages"])
def test_fp16_steps_that_are_skipped(folder: Path, ranks: int, stages: dict[str, Any] | None):
    """A scale that is too large at first: residuals stay finite, also where only another stage has an infinity."""
    changes: dict[str, Any] = {"m6__communication": communication("chunks"), "m6__training__total_steps": 6}
    changes |= {"m6__parallel__pipeline": stages, "m6__training__max_skipped_steps": 9}
    fp16 = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
    run = trained(folder, f"fp16 on {ranks}", [(ranks, 1, 3), (ranks, 1, None)], fp16=fp16, **changes)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["skipped_steps"] for line in lines if "skipped_steps" in line]
    assert sum(skipped) > 0
    assert all(total.isfinite().all() for total in residual_sums(run, 6).values())


# reducer with its options, schedule, ZeRO stage, ep_size
STAGED: dict[str, tuple[dict[str, Any], str, int, int]] = {
    "top_k": (communication("top_k"), "1f1b", 1, 1),
    "top_k of experts": (communication("top_k", warmup_steps=0), "zbv", 0, 2),
    # Matrices of full rank leave out nothing but rounding errors.
    "powersgd": (communication("powersgd", rank=64), "interleaved_1f1b", 1, 1),
    "chunks": (communication("chunks", density=1.0), "dualpipev", 1, 1),
    "slices": (communication("powersgd", rank=64), "slices", 0, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(STAGED, {"top_k", "powersgd", "chunks"}))
def test_stages_send_what_whole_models_send(folder: Path, name: str):
    """Four ranks are two pipelines. Each stage compresses its gradients over two ranks, as two whole models do."""
    reducer, schedule, stage, ep_size = STAGED[name]
    changes: dict[str, Any] = {"m6__communication": reducer, "m6__model__num_layers": 4, "train_batch_size": 16}
    changes["m6__model__hidden_dropout"] = 0.0  # that of slices is their own
    whole = trained(folder, f"whole {name}", [(2, stage, None)], ep_size, **changes)
    settings = {"slices": 3} if schedule == "slices" else {"schedule": schedule}
    stages = {"m6__parallel__pipeline": {"num_ranks": 2, **settings}}
    staged = trained(folder, f"staged {name}", [(4, stage, None)], ep_size, **changes, **stages)
    assert losses(staged) == pytest.approx(losses(whole), rel=TOLERANCE)
    assert norms(staged) == pytest.approx(norms(whole), rel=10 * TOLERANCE)
    assert len(gradient_bytes(staged)) == 4
    sums, expected = residual_sums(staged, 4), residual_sums(whole, 4)
    assert sums.keys() == expected.keys()
    for tensor, total in expected.items():
        torch.testing.assert_close(sums[tensor], total, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_pipeline_goes_on_from_any_layout_without_a_loss(folder: Path):
    """Residuals of whole models go to the stages, and back; a run that resumes has the same bytes."""
    changes: dict[str, Any] = {
        "m6__communication": communication("top_k"),
        "m6__model__num_layers": 4,
        "train_batch_size": 16,
    }
    stages = {"m6__parallel__pipeline": {"num_ranks": 2, "schedule": "1f1b"}}
    straight = trained(folder, "stages straight", [(4, 1, None)], **changes, **stages)
    assert (
        differences(trained(folder, "stages resumed", [(4, 1, 2), (4, 1, None)], **changes, **stages), straight) == []
    )
    root = trained(folder, "stages wandering", [(2, 1, 2)], **changes)
    trained(folder, "stages wandering", [(4, 1, 3)], **changes, **stages)
    trained(folder, "stages wandering", [(2, 0, None)], **changes)
    assert losses(root) == pytest.approx(losses(straight), rel=TOLERANCE)
