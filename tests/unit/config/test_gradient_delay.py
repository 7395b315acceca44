"""The section m6.gradient_delay: its keys, and when a pipeline is flushed."""

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
        ({"m6__gradient_delay": {"steps": 2}}, "m6.gradient_delay.steps"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    document = tiny_document(tmp_path, **{"m6__gradient_delay": {"accept_loss": True}, **changes})
    with pytest.raises(UserError, match=message):
        parse_config(document)


PIPELINE: dict[str, Any] = {"m6__parallel__pipeline": {"num_ranks": 2}}
SWITCH: dict[str, Any] = {"switch_step": 7, "num_groups": 2}


def test_where_a_pipeline_is_flushed(tmp_path: Path):
    intervals = {"m6__logging__interval_steps": 4, "m6__evaluation__interval_steps": 6, "m6__checkpoint": {}}
    switch = {"m6__pseudo_to_real": SWITCH, "m6__model__num_layers": 4}
    changes = {**PIPELINE, **intervals, **switch, "m6__training__total_steps": 13, "m6__gradient_delay": {}}
    document = tiny_document(tmp_path, **ADAFACTOR, **changes)
    config = parse_config(document)
    assert config.is_asynchronous
    assert [step for step in range(1, 14) if config.flushes_after(step)] == [4, 6, 7, 8, 12, 13]


EXPERTS = {**OFFLOAD, "optimizer": {"type": "Adafactor", "lr": 0.01}}


@pytest.mark.parametrize("changes", [ADAFACTOR, {**MUON, "m6__offload": EXPERTS}])
def test_what_can(tmp_path: Path, changes: dict[str, Any]):
    assert parse_config(tiny_document(tmp_path, m6__gradient_delay={}, **changes)).m6.gradient_delay is not None
