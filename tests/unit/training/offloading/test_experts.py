"""Training with offloaded experts: the same run, whatever the budget, and its checkpoints fit any other."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image

import offload.runtime.slots
from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from m6.errors import UserError
from m6.plots.plans import plot_memory
from m6.training.loop import Trainer
from m6.training.offloading.report import MEMORY_RECORD
from offload import WorkerFailure
from tests.fixtures.offload_sections import ALL_HOST, LARGE, SMALL, TIGHT, assert_equal, experts_of, metrics, state

MakeTrainer = Callable[..., Trainer]

CASES = {
    "fp32": {},
    "checkpointing": {"m6__training__activation_checkpointing": True},
    "zero_1_bf16": {"zero_optimization__stage": 1, "bf16": {"enabled": True}},
    "zero_2": {"zero_optimization__stage": 2},
    "adafactor": {"optimizer__type": "Adafactor", "optimizer__params": {"lr": 1e-3}},
    "muon": {"optimizer__type": "Muon", "optimizer__params": {"lr": 1e-2, "adamw_lr": 1e-3}, "m6__moe__bias": True},
    "muon_swiglu": {
        "optimizer__type": "Muon",
        "optimizer__params": {"lr": 1e-2, "adamw_lr": 1e-3},
        "m6__moe__activation": "swiglu",
        "m6__moe__bias": True,
    },
    "no_accumulation": {"train_batch_size": 2},
    "biases": {"m6__moe__bias": True},
    "dropout": {"m6__moe__expert_dropout": 0.2},
    "pseudo": {"m6__pseudo_to_real": {"switch_step": 3}, "m6__model__num_layers": 4},
    "together": {
        "m6__pseudo_to_real": {"switch_step": 3},
        "m6__moe__bias": True,
        "m6__moe__expert_dropout": 0.2,
        "m6__training__activation_checkpointing": True,
    },
    "pseudo_sum": {"m6__pseudo_to_real": {"switch_step": 3, "gradient": "sum", "optimizer_state": "reset"}},
}


FAST = ("fp32",)


@pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, id=name, marks=() if name in FAST else pytest.mark.slow) for name, changes in CASES.items()],
)
def test_the_budget_changes_nothing_and_offloading_only_roundings(make_trainer: MakeTrainer, changes: dict[str, Any]):
    """Between budgets equal to the bit. Against no offloading: the update's operations have another order, and
    micro-batches of bf16 gradients add up in fp32 instead of bf16."""
    changes = {"m6__training__total_steps": 6, **changes}
    small = make_trainer("small", m6__offload=SMALL, **changes)
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


@pytest.mark.slow
@pytest.mark.parametrize("second", [LARGE, {**ALL_HOST, "prefetch_depth": 3}, None])
def test_resuming_under_another_budget(make_trainer: MakeTrainer, second: dict[str, Any] | None):
    """To the bit; and without offloading at all to the roundings of its other update."""
    whole = make_trainer("whole", m6__offload=TIGHT)
    whole.train()
    plan = experts_of(whole).runtime.plan
    assert plan is not None
    assert 0 < len(plan.owned) < 4
    assert plan.upload_bytes > 0
    halves = make_trainer("halves", m6__offload=SMALL)
    halves.train(stop_after=2)
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
    plain.train(stop_after=2)
    saved = CheckpointReader(complete_checkpoints(plain.run.checkpoints)[-1])
    offloaded = make_trainer("run", m6__offload=SMALL)
    offloaded._resume()
    assert experts_of(offloaded).runtime.num_updates == 2
    for fragment in offloaded.engine.fragments():
        expected = torch.empty_like(fragment.data)
        saved.read_into(fragment.name, fragment.kind, 0, expected)
        assert torch.equal(fragment.data, expected), (fragment.name, fragment.kind)
    assert offloaded.train()


def test_a_save_only_reads_the_experts(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer("run", m6__offload=SMALL)
    monkeypatch.setattr(experts_of(trainer).runtime, "write", lambda *_: pytest.fail("a save has written"))
    trainer.checkpointer.save(trainer.engine, 1, {})
    trainer.checkpointer.wait()


def test_times_are_measured_in_the_first_steps_alone(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch):
    """The plan is made from them. A GPU would record two events at each use of a chunk, and wait for the last one."""
    trainer = make_trainer("run", m6__offload=SMALL)
    runtime, replan, marks = experts_of(trainer).runtime, trainer._replan_offloading, [0]
    monkeypatch.setattr(runtime.device, "mark", lambda: marks.append(marks.pop() + 1) or 0.0)
    monkeypatch.setattr(trainer, "_replan_offloading", lambda: [replan(), marks.append(0)])
    trainer.train()
    assert all(marks[:2])
    assert marks[2:] == [0, 0, 0]


def test_the_memory_map_and_its_picture(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]):
    """Before the first step by the dry trace, and after it by that step; then both against what was there."""
    trainer = make_trainer("run", m6__offload=TIGHT)
    trainer.train()
    printed = capsys.readouterr().err
    plan = experts_of(trainer).runtime.plan
    assert plan is not None
    for source in ("a dry trace", "the first step"):
        assert f"offloaded experts, planned by {source}: 4 chunks of at most 0.0 MiB, 0.5 MiB with gradients" in printed
    assert f"moved per step: {plan.upload_bytes / 2**20:,.1f} MiB up" in printed
    assert f"owns {len(plan.owned)} chunks" in printed

    record = json.loads((trainer.run.root / MEMORY_RECORD).read_text())
    assert record["step"] == 1
    assert [moment["chunk"] for moment in record["planned"]] == [moment.chunk for moment in plan.trace.moments]
    assert len(record["actual"]) == len(record["planned"])
    for planned, actual in zip(record["planned"], record["actual"], strict=True):
        assert 0 < actual["nonmodel_bytes"] <= actual["total_bytes"] <= record["budget_bytes"]
        # The dry trace is of rows that are full, and these are not: the plan holds.
        assert actual["nonmodel_bytes"] <= planned["nonmodel_bytes"]

    out = plot_memory(trainer.run.root)
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000
    (trainer.run.root / MEMORY_RECORD).write_text("{}")
    with pytest.raises(UserError, match=r"memory_rank_00000\.json: corrupt"):
        plot_memory(trainer.run.root)
    (trainer.run.root / MEMORY_RECORD).unlink()
    with pytest.raises(UserError, match=r"memory_rank_00000\.json: no such file; a run with m6\.offload"):
        plot_memory(trainer.run.root)


@pytest.mark.slow
def test_fp16_skips_the_steps_that_overflow(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch):
    """A scale that is too large for the first steps: experts and all else skip the same ones, under either budget."""
    monkeypatch.setattr("deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda self: True)
    changes = {
        "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 100, "hysteresis": 1},
        "zero_optimization": {"stage": 2},
        "m6__training__total_steps": 12,
        "gradient_clipping": 0.5,
    }
    small = make_trainer("small", m6__offload=SMALL, **changes)
    before = state(small)
    assert small.train()
    large = make_trainer("large", m6__offload=LARGE, **changes)
    assert large.train()
    norms = [norm for _, norm in metrics(small)]
    assert norms[0] is None, "the first step overflows"
    assert norms[-1] is not None, "a scale was found"
    assert metrics(small) == metrics(large)
    assert_equal(state(small), state(large))
    experts = experts_of(small)
    applied = sum(norm is not None for norm in norms)
    assert experts.runtime.num_updates == applied
    after = state(small)
    changed = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert any("experts" in name for name, _ in changed)


@pytest.mark.parametrize("optimizer", [None, {"type": "Adafactor", "lr": 0.002}, {"type": "SGD", "lr": 0.1}])
def test_updates_in_the_backward_pass_change_nothing(make_trainer: MakeTrainer, optimizer: dict[str, Any] | None):
    """Nor does it matter where experts lie; the experts' optimizer may be another one than that of the rest."""
    changes = {"train_batch_size": 2, "gradient_clipping": 0.0, "zero_optimization__stage": 1}
    own = {} if optimizer is None else {"optimizer": optimizer}
    early = make_trainer("early", m6__offload={**SMALL, "update": "backward", **own}, **changes)
    assert early.train()
    late = make_trainer("late", m6__offload={**LARGE, **own}, **changes)
    assert late.train()
    assert metrics(early) == metrics(late)
    assert_equal(state(early), state(late))
    assert experts_of(early).state_bytes < experts_of(late).state_bytes


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_experts_without_masters(make_trainer: MakeTrainer, precision: str, monkeypatch: Any):
    """Neither the budget nor a resumption changes a bit. The losses are those with masters within 0.01, of about 4."""
    # DeepSpeed refuses fp16 on processors without instructions for it, on which it is slow but works.
    monkeypatch.setattr("deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda self: True)
    changes: dict[str, Any] = {
        precision: {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})},
        "zero_optimization__stage": 1,
        "train_batch_size": 2,
    }
    own = {"optimizer": {"type": "Adafactor", "lr": 0.005}}
    without = {**own, "master_weights": False}
    small = make_trainer("small", m6__offload={**SMALL, **without}, **changes)
    assert small.train()
    make_trainer("halves", m6__offload={**SMALL, **without}, **changes).train(stop_after=2)
    halves = make_trainer("halves", m6__offload={**LARGE, **without}, **changes)
    assert halves.train()
    assert metrics(small) == metrics(halves)
    assert_equal(state(small), state(halves))
    masters = make_trainer("masters", m6__offload={**LARGE, **own}, **changes)
    assert masters.train()
    for (expected, _), (loss, _) in zip(metrics(masters), metrics(small), strict=True):
        assert abs(loss - expected) < 0.01
    saved = experts_of(masters).state_bytes - experts_of(small).state_bytes
    numel = sum(value.numel() for (name, kind), value in state(small).items() if "experts" in name and kind == "weight")
    assert saved == pytest.approx(numel * (2 if precision == "bf16" else 4), rel=0.01)


def test_updates_in_the_backward_pass_cannot_be_skipped(make_trainer: MakeTrainer, monkeypatch: Any):
    changes = {"train_batch_size": 2, "gradient_clipping": 0.0}
    trainer = make_trainer("run", m6__offload={**SMALL, "update": "backward"}, **changes)
    monkeypatch.setattr(experts_of(trainer).runtime, "sum_of_squares", lambda: float("inf"))
    with pytest.raises(UserError, match=r'gradients are not finite.*"update": "backward".*last checkpoint'):
        trainer.train()
    assert complete_checkpoints(trainer.run.checkpoints) == []


def test_a_failure_in_a_thread_ends_the_training_with_its_cause(make_trainer: MakeTrainer, monkeypatch: Any):
    """Nothing is saved that was half updated; the checkpoint before stays whole."""
    trainer = make_trainer("run", m6__offload=SMALL, m6__training__total_steps=6)
    steps = []
    update = offload.runtime.slots.update

    def fail(*arguments: Any) -> None:
        steps.append(arguments[1])
        if arguments[1] == 4 and threading.current_thread() is not threading.main_thread():
            raise MemoryError("no memory left")
        update(*arguments)

    monkeypatch.setattr(offload.runtime.slots, "update", fail)
    with pytest.raises(WorkerFailure, match="no memory left"):
        trainer.train()
    assert 4 in steps
    trainer.checkpointer.wait()  # the checkpoint before is written beside the steps
    saved = complete_checkpoints(trainer.run.checkpoints)
    assert [folder.name for folder in saved] == ["step_00000002"]
    CheckpointReader(saved[0]).verify(0, 1)


@pytest.mark.slow
def test_the_size_of_chunks_by_itself(make_trainer: MakeTrainer):
    trainer = make_trainer("run", m6__offload={"device_budget_mib": 100.0, "chunk_mib": "auto"})
    assert trainer.train()
    plain = make_trainer("plain", m6__offload=LARGE)
    assert plain.train()
    assert metrics(trainer) == metrics(plain)


@pytest.mark.slow
def test_deepspeeds_own_offload(make_trainer: MakeTrainer):
    """The policy writes DeepSpeed's keys and nothing of ours: the run is the one with those keys."""
    changes = {"zero_optimization": {"stage": 2}}
    policy = make_trainer("policy", m6__offload={"policy": "deepspeed"}, **changes)
    assert policy.engine.offloaded is None
    assert policy.config.deepspeed.keys["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert policy.train()
    own = make_trainer(
        "own", zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    )
    assert own.train()
    assert metrics(policy) == metrics(own)


@pytest.mark.slow
def test_a_rule_for_all_optimizer_state_is_deepspeeds_offload_beside_ours(make_trainer: MakeTrainer):
    changes = {"zero_optimization": {"stage": 1}}
    rules = [{"tensor": "optimizer_state", "place": "host"}]
    ruled = make_trainer("ruled", m6__offload={**LARGE, "rules": rules}, **changes)
    assert ruled.config.deepspeed.keys["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert ruled.train()
    plan = experts_of(ruled).runtime.plan
    assert plan is not None
    assert not plan.owned
    plain = make_trainer("plain", m6__offload=LARGE, **changes)
    assert plain.train()
    torch.testing.assert_close(torch.tensor(metrics(ruled)), torch.tensor(metrics(plain)), rtol=2e-5, atol=1e-6)


def test_not_finite_gradients_leave_the_experts_as_they_were(make_trainer: MakeTrainer, monkeypatch: Any):
    trainer = make_trainer("run", m6__offload=SMALL, m6__training__total_steps=1)
    before = state(trainer)
    experts = experts_of(trainer)
    monkeypatch.setattr(experts.runtime, "sum_of_squares", lambda: float("inf"))
    trainer.train()
    after = state(trainer)
    for key in before:
        assert torch.equal(before[key], after[key]), key
