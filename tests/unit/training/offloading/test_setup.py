"""What a section ``m6.offload`` may not say, and budgets that hold nothing: an error before the training starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from m6.config.run import parse_config
from m6.errors import UserError
from m6.training.engine.build import build_model
from m6.training.fake_world import fake_process_group
from m6.training.loop import Trainer
from m6.training.offloading import setup
from tests.distributed.spawn import run_distributed
from tests.fixtures.offload_sections import ALL_HOST, SMALL, experts_of
from tests.fixtures.tiny_run import tiny_document

MakeTrainer = Callable[..., Trainer]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m6__moe": None}, "m6.offload: only experts are offloaded"),
        ({"zero_optimization__stage": 3}, "needs zero_optimization.stage 0, 1 or 2"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "use bf16 instead of torch_autocast"),
        ({"m6__offload": {"device_budget_mib": 0}}, r"m6.offload.device_budget_mib: input should be greater than 0"),
        ({"m6__offload": {**SMALL, "chunk_size": 1}}, r"m6.offload.chunk_size: unknown key.*chunk_mib"),
        (
            {"m6__pseudo_to_real": {"switch_step": 2, "switch": "gradient_correlation"}},
            r"compares gradients between layers, but m6\.offload",
        ),
        ({"m6__offload": {"update": "backward"}}, r"needs the norm of all gradients before the first update"),
        (
            {"m6__offload": {"master_weights": False}},
            r'"master_weights": false is for experts in 16 bits.*use bf16 or fp16',
        ),
        (
            {
                "m6__offload": {"update": "backward"},
                "gradient_clipping": 0.0,
                "fp16": {"enabled": True},
                "zero_optimization": {"stage": 1},
            },
            r'fp16 finds its loss scale by steps that are skipped.*; use "update": "next_forward", or use bf16',
        ),
        ({"m6__offload": {"policy": "deepspeed"}}, r'"policy": "deepspeed" needs zero_optimization.stage 1, 2 or 3'),
        (
            {"m6__offload": {"policy": "deepspeed", "num_threads": 2}, "zero_optimization": {"stage": 1}},
            r'm6.offload.num_threads: "policy": "deepspeed" would ignore it',
        ),
        (
            {
                "m6__offload": {"policy": "deepspeed"},
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            },
            r"zero_optimization.offload_optimizer: m6.offload .* sets it",
        ),
        ({"m6__offload": {"optimizer": {"type": "SGD", "lr": 1.0, "eps": 1.0}}}, r"eps: SGD would ignore it.*AdamW"),
        ({"m6__offload": {"optimizer": {"type": "Lion", "lr": 1.0}}}, r"m6.offload.optimizer.type"),
    ],
)
def test_bad_settings(folder: Any, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        parse_config(tiny_document(folder, **{"m6__offload": SMALL, **changes}))


def test_a_short_host_is_found_before_the_training(folder: Any, monkeypatch: pytest.MonkeyPatch):
    """By what is available, though nobody stated a budget; divided among the ranks of the host."""
    config = parse_config(tiny_document(folder, m6__offload=ALL_HOST))
    monkeypatch.setattr("m6.training.offloading.setup.available_bytes", lambda: 2**20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"the host's budget of 0.2375 MiB is too small: the experts need [\d.]+ MiB"):
        build_model(config, torch.device("cpu"))


def repeated_passes_leave_the_trace_of_all(folder: Path, schedule: str, rank: int, recomputes: bool) -> None:
    document = tiny_document(folder, m6__offload=SMALL, m6__model__num_layers=4)
    document["m6"]["parallel"] = {"pipeline": {"num_ranks": 2, "schedule": schedule}}
    document["m6"]["training"]["activation_checkpointing"] = recomputes
    config, run_pipeline, run = parse_config(document), setup.run_pipeline, setup._forward
    passes: list[int] = []

    def all_passes(*arguments: Any, repeats: bool) -> Any:
        return run_pipeline(*arguments, repeats=False)

    def traced() -> Any:
        return setup.dry_trace(config, None, torch.float32, 20_000, ())[0]

    with (
        fake_process_group(rank, 2),
        mock.patch.object(setup, "_forward", lambda *arguments: passes.append(1) or run(*arguments)),
    ):
        found = traced()
        assert len(passes) == 2 * len(config.pipeline.stages_of(rank))
        with mock.patch.object(setup, "run_pipeline", all_passes):
            expected = traced()
        assert len(passes) == (2 + 4) * len(config.pipeline.stages_of(rank))
    assert found == expected, (schedule, rank)


def compare_traces(folder: Path, cases: list[tuple[str, int, bool]]) -> None:
    for case in cases:
        repeated_passes_leave_the_trace_of_all(folder, *case)


@pytest.mark.slow
def test_passes_of_a_pipeline_that_are_repeated_leave_the_trace_of_all(folder: Path):
    """To the byte; two micro-batches of four are run. In a process of its own, which has no process group."""
    cases = [("1f1b", 0, True), ("1f1b", 1, False), ("zbv", 0, False), ("dualpipev", 1, True)]
    run_distributed(compare_traces, 1, folder, cases)


def test_a_budget_below_the_nonmodel_memory_is_an_error_of_the_first_step(make_trainer: MakeTrainer):
    trainer = make_trainer("run", m6__offload={"device_budget_mib": 1.0, "chunk_mib": 0.04})
    assert "no plan fits the dry trace" in experts_of(trainer).memory_map()
    with pytest.raises(UserError, match=r"m6.offload: the device's budget of 1 MiB.*smallest that suffices"):
        trainer.train()


def test_a_message_names_the_bucket_that_takes_most_of_a_budget(make_trainer: MakeTrainer):
    """1907 MiB of fp32 at DeepSpeed's default, for a model of a few."""
    changes = {"m6__offload": {"device_budget_mib": 16.0}, "zero_optimization": {"stage": 1}}
    trainer = make_trainer("run", **changes)
    assert "with 1907.3487 MiB of DeepSpeed's zero_optimization" in experts_of(trainer).memory_map()
    with pytest.raises(UserError, match=r"smallest that suffices is 19\d\d.* with 1907.* MiB of .*reduce_bucket_size$"):
        trainer.train()


def test_a_later_step_that_needs_more_than_the_budget(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer("run", m6__offload=SMALL)
    replan = trainer._replan_offloading

    def shrink() -> None:
        replan()
        experts_of(trainer).runtime.device.budget_bytes = 1000

    monkeypatch.setattr(trainer, "_replan_offloading", shrink)
    with pytest.raises(UserError, match=r"m6\.offload\.device_budget_mib: \d+ bytes .*the budget of 1000; .*larger"):
        trainer.train()


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ({"device_budget_mib": 0.01}, r"m6.offload: the device's budget of 0.01 MiB.*smallest"),
        ({**ALL_HOST, "host_budget_mib": 0.1}, r"m6.offload: the host's budget of 0.1 MiB"),
        ({**ALL_HOST, "host_budget_mib": 1e9}, r"host_budget_mib 1e\+09 is more than this host has available"),
        ({}, r'"auto" is the free memory of a GPU; the simulated device'),
    ],
)
def test_small_budgets(folder: Any, offload: dict[str, Any], message: str):
    config = parse_config(tiny_document(folder, m6__offload=offload))
    with pytest.raises(UserError, match=message):
        build_model(config, torch.device("cpu"))
