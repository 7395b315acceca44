"""Probes of the planner's rules against the installed DeepSpeed: an upgrade that lifts a limit fails here."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from m6.config.run import RunConfig, parse_config
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.machine.profile import Profile
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.training.deepspeed_private import base_optimizer
from m6.training.engine.build import build_engine
from m6.training.engine.engine import Engine
from m6.training.sizes import storage_bytes
from tests.distributed.spawn import run_distributed
from tests.fixtures.tiny_run import tiny_document

pytestmark = pytest.mark.slow

BF16 = {"enabled": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limits")


def forced(document: dict[str, Any], stage: int, optimizer: str = "AdamW", **section: Any) -> RunConfig:
    """A run that our validation would refuse."""
    config = parse_config(document)
    keys = {**config.deepspeed.keys, "zero_optimization": {"stage": stage, **section}}
    params = {"beta2_decay": -0.8, "clipping_threshold": 1.0} if optimizer == "Adafactor" else {}
    update = {
        "zero_stage": stage,
        "keys": keys,
        "optimizer_type": optimizer,
        "optimizer_params": {**config.deepspeed.optimizer_params, **params},
    }
    return replace(config, deepspeed=config.deepspeed.model_copy(update=update))


def one_step(config: RunConfig, engine: Engine) -> None:
    batch = open_data(config).micro_batch(0)
    engine.accumulate([batch], lambda _, output: output.target_losses.sum() + output.aux_loss, [0])
    engine.update()


def split_experts_at_stage_3(document: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="not supported with ZeRO Stage 3"):
        build_engine(forced(document, 3), start())


def test_stage_3_refuses_split_experts(folder):
    run_distributed(split_experts_at_stage_3, 2, tiny_document(folder, m6__training__ep_size=2))


def ignored_offload(document: dict[str, Any]) -> None:
    host = {"device": "cpu"}
    plain = build_engine(forced(document, 0, offload_optimizer=host), start())
    assert not hasattr(plain._deepspeed.optimizer, "cpu_offload"), "stage 0 has no optimizer that could offload"
    below = build_engine(forced(document, 2, offload_param=host), start())
    assert not below._deepspeed.optimizer.cpu_offload
    assert not any(hasattr(parameter, "ds_tensor") for parameter in below.module.parameters())
    assert build_engine(forced(document, 2, offload_optimizer=host), start())._deepspeed.optimizer.cpu_offload


def test_offload_below_its_stage_is_ignored(folder):
    run_distributed(ignored_offload, 1, tiny_document(folder))


def flat_adafactor(document: dict[str, Any]) -> None:
    config = forced(document, 1, "Adafactor")
    config.deepspeed.keys["zero_allow_untested_optimizer"] = True
    engine = build_engine(config, start())
    one_step(config, engine)
    states = list(base_optimizer(engine._deepspeed).state.values())
    assert states
    assert all("row_var" not in state and state["variance"].dim() == 1 for state in states)


def test_a_partition_has_no_rows_and_columns(folder):
    run_distributed(flat_adafactor, 1, tiny_document(folder, train_batch_size=4, train_micro_batch_size_per_gpu=4))


def host_census(document: dict[str, Any], accumulation: int) -> None:
    """All storages that live between two steps but the weights: what offloading keeps on the host."""
    config = parse_config(document)
    before = {id(found) for found in gc.get_objects() if isinstance(found, torch.Tensor)}
    engine, data = build_engine(config, start()), open_data(config)
    for step in range(2):
        batches = [data.micro_batch(step * accumulation + index) for index in range(accumulation)]
        engine.accumulate(batches, lambda _, output: output.target_losses.sum() + output.aux_loss, [0] * accumulation)
        engine._deepspeed.step()
        del batches
    del data
    gc.collect()
    weights = [parameter.data for parameter in engine.module.parameters()]
    tensors = [f for f in gc.get_objects() if isinstance(f, torch.Tensor) and id(f) not in before]
    held = storage_bytes(*tensors, *weights) - storage_bytes(*weights)
    model = MemoryModel(config, Profile())
    layout = ParallelLayout(1, zero_stage=2, micro_batch_size=config.deepspeed.micro_batch_size, offload_optimizer=True)
    predicted = model(layout).host
    # Beside the optimizer's some small tensors live.
    assert held == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_bytes_of_an_offloaded_optimizer(folder, accumulation):
    document = tiny_document(
        folder,
        bf16=BF16,
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000000},
        train_batch_size=4 * accumulation,
        train_micro_batch_size_per_gpu=4,
        m6__model__ffn_hidden_size=2048,
    )
    run_distributed(host_census, 1, document, accumulation)


def test_the_limits_are_those_of_the_installed_version():
    assert deepspeed.__version__.split("+")[0] == "0.19.8"
