"""Training with offloaded experts: the same run, whatever the budget, and its checkpoints fit any other."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from m6.config import parse_config
from m6.errors import UserError
from m6.training.checkpoint import all_fragments, complete_checkpoints
from m6.training.checkpoint_format import CheckpointReader
from m6.training.engine import build_model
from m6.training.loop import Trainer
from m6.training.offloading import OffloadedExperts, offloaded_experts
from tests.fixtures.tiny_run import tiny_document

MakeTrainer = Callable[..., Trainer]
# One expert is 16 KiB of fp32 weights: two a chunk; the device can own some of the four chunks, not all.
SMALL = {"device_budget_mib": 0.4, "chunk_mib": 0.04}
LARGE = {"device_budget_mib": 1000.0}


def metrics(trainer: Trainer) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def state(trainer: Trainer) -> dict[tuple[str, str], torch.Tensor]:
    return {(part.name, part.kind): part.data.clone() for part in all_fragments(trainer.engine)}


def experts_of(trainer: Trainer) -> OffloadedExperts:
    experts = offloaded_experts(trainer.engine)
    assert experts is not None
    return experts


def assert_equal(left: dict[Any, torch.Tensor], right: dict[Any, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


CASES = {
    "fp32": {},
    "checkpointing": {"m6__training__activation_checkpointing": True},
    "zero_1_bf16": {"zero_optimization__stage": 1, "bf16": {"enabled": True}},
    "zero_2": {"zero_optimization__stage": 2},
    "adafactor": {"optimizer__type": "Adafactor", "optimizer__params": {"lr": 1e-3}, "device_budget_mib": 0.3},
    "no_accumulation": {"train_batch_size": 2},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_budget_changes_nothing_and_offloading_only_roundings(make_trainer: MakeTrainer, changes: dict[str, Any]):
    """Between budgets equal to the bit. Against no offloading: the update's operations have another order, and
    micro-batches of bf16 gradients add up in fp32 instead of bf16."""
    changes = {"m6__training__total_steps": 6, **changes}
    budget = changes.pop("device_budget_mib", SMALL["device_budget_mib"])
    small = make_trainer("small", m6__offload={**SMALL, "device_budget_mib": budget}, **changes)
    assert small.train()
    large = make_trainer("large", m6__offload=LARGE, **changes)
    assert large.train()
    plain = make_trainer("plain", **changes)
    assert plain.train()

    plan = experts_of(small).runtime.plan
    assert plan is not None
    assert 0 < len(plan.owned) < len(experts_of(small).runtime.sizes)
    assert experts_of(small).runtime.statistics.num_misses == 0
    assert metrics(small) == metrics(large)
    assert_equal(state(small), state(large))
    tolerance = 2e-2 if "bf16" in changes else 2e-5
    torch.testing.assert_close(torch.tensor(metrics(small)), torch.tensor(metrics(plain)), rtol=tolerance, atol=1e-6)
    assert state(small).keys() == state(plain).keys()


def test_experts_start_as_they_would_without_offloading(make_trainer: MakeTrainer):
    offloaded, plain = make_trainer("offloaded", m6__offload=SMALL), make_trainer("plain")
    weights = {name: value for (name, kind), value in state(offloaded).items() if kind == "weight"}
    for name, parameter in plain.engine.module.named_parameters():
        assert torch.equal(weights[name], parameter.detach().view(-1)), name


@pytest.mark.parametrize("second", [LARGE, {"device_budget_mib": 0.2, "chunk_mib": 0.001, "prefetch_depth": 3}, None])
def test_resuming_under_another_budget(make_trainer: MakeTrainer, second: dict[str, Any] | None):
    """To the bit; and without offloading at all to the roundings of its other update."""
    whole = make_trainer("whole", m6__offload=SMALL)
    whole.train()
    halves = make_trainer("halves", m6__offload=SMALL)
    halves.run.stop_requested = lambda: halves.step + 1 >= 2  # type: ignore[method-assign]
    halves.train()
    resumed = make_trainer("halves", m6__offload=second)
    assert resumed.train()
    assert len(metrics(resumed)) == 4
    if second is None:
        torch.testing.assert_close(torch.tensor(metrics(resumed)), torch.tensor(metrics(whole)), rtol=2e-5, atol=1e-6)
    else:
        assert metrics(resumed) == metrics(whole)
        assert_equal(state(resumed), state(whole))


def test_a_plain_run_goes_on_offloaded(make_trainer: MakeTrainer):
    plain = make_trainer("run")
    plain.run.stop_requested = lambda: plain.step + 1 >= 2  # type: ignore[method-assign]
    plain.train()
    saved = CheckpointReader(complete_checkpoints(plain.run.checkpoints)[-1])
    offloaded = make_trainer("run", m6__offload=SMALL)
    offloaded._resume()
    assert experts_of(offloaded).runtime.num_updates == 2
    for fragment in all_fragments(offloaded.engine):
        expected = torch.empty_like(fragment.data)
        saved.read_into(fragment.name, fragment.kind, 0, expected)
        assert torch.equal(fragment.data, expected), (fragment.name, fragment.kind)
    assert offloaded.train()


def test_the_memory_map(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]):
    trainer = make_trainer("run", m6__offload=SMALL)
    trainer.train()
    printed = capsys.readouterr().err
    plan = experts_of(trainer).runtime.plan
    assert plan is not None
    assert "offloaded experts: 4 chunks, 0.5 MiB with gradients and optimizer state" in printed
    assert f"moved per step: {plan.upload_bytes / 2**20:,.1f} MiB up" in printed


def test_not_finite_gradients_leave_the_experts_as_they_were(make_trainer: MakeTrainer, monkeypatch: Any):
    trainer = make_trainer("run", m6__offload=SMALL, m6__training__total_steps=1)
    before = state(trainer)
    experts = experts_of(trainer)
    monkeypatch.setattr(experts.runtime, "sum_of_squares", lambda: float("inf"))
    trainer.train()
    after = state(trainer)
    for key in before:
        assert torch.equal(before[key], after[key]), key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m6__moe": None}, "m6.offload: only experts are offloaded"),
        ({"zero_optimization__stage": 3}, "needs zero_optimization.stage 0, 1 or 2"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "use bf16 instead of torch_autocast"),
        ({"m6__offload": {"device_budget_mib": 0}}, r"m6.offload.device_budget_mib"),
        ({"m6__offload": {**SMALL, "chunk_size": 1}}, r"m6.offload.chunk_size: unknown key.*chunk_mib"),
    ],
)
def test_bad_settings(folder: Any, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        parse_config(tiny_document(folder, **{"m6__offload": SMALL, **changes}))


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ({"device_budget_mib": 0.01}, r"m6.offload: the device's budget of 10485 bytes.*smallest"),
        ({"device_budget_mib": 10, "host_budget_mib": 0.1}, r"m6.offload: the host's budget of 104857 bytes"),
    ],
)
def test_small_budgets(folder: Any, offload: dict[str, Any], message: str):
    config = parse_config(tiny_document(folder, m6__offload=offload))
    with pytest.raises(UserError, match=message):
        build_model(config, torch.device("cpu"))
