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
        (
            {"zero_optimization": {"stage": 1}, "m6__parallel": {"pipeline": {"num_ranks": 2}}},
            "ends each step with a flush",
        ),
        ({"m6__lora": {}, "m6__init": "runs/first"}, "adapters of m6.lora were not tried"),
        ({"m6__gradient_delay": {"steps": 2}}, "m6.gradient_delay.steps"),
    ],
)
def test_what_cannot_be_combined(tmp_path: Path, changes: dict[str, Any], message: str):
    document = tiny_document(tmp_path, **{"m6__gradient_delay": {"accept_loss": True}, **changes})
    with pytest.raises(UserError, match=message):
        parse_config(document)


EXPERTS = {**OFFLOAD, "optimizer": {"type": "Adafactor", "lr": 0.01}}


@pytest.mark.parametrize("changes", [ADAFACTOR, {**MUON, "m6__offload": EXPERTS}])
def test_what_can(tmp_path: Path, changes: dict[str, Any]):
    assert parse_config(tiny_document(tmp_path, m6__gradient_delay={}, **changes)).m6.gradient_delay is not None
