"""The section m6.gradient_delay: what it refuses, with one message each."""

from pathlib import Path
from typing import Any

import pytest

from m6.config.run import parse_config
from m6.errors import UserError
from tests.fixtures.tiny_run import tiny_document

ADAFACTOR = {"optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}
OFFLOAD = {"device_budget_mib": 64.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m6__gradient_delay": {}}, 'optimizer.type "AdamW" learns worse .*AdamW lost 0.19 nats.*accept_loss=true'),
        (
            {**ADAFACTOR, "m6__gradient_delay": {}, "m6__offload": {**OFFLOAD, "optimizer": {"type": "SGD", "lr": 1}}},
            'm6.offload.optimizer.type "SGD" learns worse',
        ),
        (ADAFACTOR, "accept_loss: Adafactor may be late without it"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage 3 was not tried"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer has one buffer for gradients",
        ),
        (
            {"zero_optimization": {"stage": 1}, "m6__offload": {"policy": "deepspeed"}},
            "offload_optimizer has one buffer for gradients",
        ),
        (
            {"gradient_clipping": 0.0, "train_batch_size": 2, "m6__offload": {**OFFLOAD, "update": "backward"}},
            'm6.offload.update "backward" keeps no gradient',
        ),
        ({"m6__training__deterministic": "any_world"}, "any_world.* was not tried with late gradients"),
        ({"m6__communication": {"gradients": "top_k", "density": 0.1}}, 'use "all_reduce", or m6.gradient_delay=null'),
        ({"m6__lora": {}, "m6__init": "runs/first"}, "adapters of m6.lora were not tried"),
        ({"m6__gradient_delay": {"steps": 2}}, "m6.gradient_delay.steps"),
    ],
)
def test_what_cannot_be_combined(tmp_path: Path, changes: dict[str, Any], message: str):
    document = tiny_document(tmp_path, **{"m6__gradient_delay": {"accept_loss": True}, **changes})
    with pytest.raises(UserError, match=message):
        parse_config(document)


PIPELINE: dict[str, Any] = {"m6__parallel__pipeline": {"num_ranks": 2}}
SWITCH: dict[str, Any] = {"switch_step": 7, "num_groups": 2}
ZBV = {"num_ranks": 2, "schedule": "zbv"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m6__parallel__pipeline": ZBV, "m6__model__num_layers": 4}, '"zbv" ends each step with a flush.*use "1f1b"'),
        ({"m6__parallel__pipeline": {"num_ranks": 2, "slices": 2}, "m6__moe__capacity_factor": None}, "leave slices"),
        ({"m6__offload": {**OFFLOAD, "optimizer": {"type": "Adafactor", "lr": 1}}}, "one version of the experts"),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "fp16's loss scale was not tried"),
        ({"m6__moe__balance_bias_rate": 0.01}, "balance_bias_rate changes routers between two steps"),
        (
            {"m6__pseudo_to_real": {**SWITCH, "switch": "loss_plateau"}, "m6__model__num_layers": 4},
            'waits for the loss of each; use "step"',
        ),
    ],
)
def test_what_a_pipeline_without_a_flush_refuses(tmp_path: Path, changes: dict[str, Any], message: str):
    delay = {"m6__gradient_delay": {"accept_loss": True}}
    with pytest.raises(UserError, match=message):
        parse_config(tiny_document(tmp_path, **{**delay, **PIPELINE, **changes}))


def test_where_a_pipeline_is_flushed(tmp_path: Path):
    intervals = {"m6__logging__interval_steps": 4, "m6__evaluation__interval_steps": 6, "m6__checkpoint": {}}
    switch = {"m6__pseudo_to_real": SWITCH, "m6__model__num_layers": 4}
    changes = {**PIPELINE, **intervals, **switch, "m6__training__total_steps": 13, "m6__gradient_delay": {}}
    document = tiny_document(tmp_path, **ADAFACTOR, **changes)
    config = parse_config(document)
    assert config.is_flushless
    assert [step for step in range(1, 14) if config.flushes_after(step)] == [4, 6, 7, 8, 12, 13]


EXPERTS = {**OFFLOAD, "optimizer": {"type": "Adafactor", "lr": 0.01}}


@pytest.mark.parametrize("changes", [ADAFACTOR, {**MUON, "m6__offload": EXPERTS}])
def test_what_can(tmp_path: Path, changes: dict[str, Any]):
    assert parse_config(tiny_document(tmp_path, m6__gradient_delay={}, **changes)).m6.gradient_delay is not None
