"""When the Pseudo stage ends, and settings of it that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import RunConfig, parse_config
from m6.errors import UserError
from m6.training.stages.stage import Stage
from tests.fixtures.tiny_run import tiny_document

MODEL = {"m6__model__num_layers": 4}


def config_of(folder: Path, **settings: Any) -> RunConfig:
    stage = {"switch_step": 50, **settings}
    return parse_config(tiny_document(folder, **MODEL, m6__pseudo_to_real=stage, m6__training__total_steps=100))


def stage_of(folder: Path, **settings: Any) -> Stage:
    return Stage(config_of(folder, **settings), None)


def test_a_plateau_ends_the_stage(runtime: Any, folder: Path):
    settings = {"switch": "loss_plateau", "plateau_window_steps": 3, "plateau_improvement": 0.1}
    stage = stage_of(folder, **settings)
    nan = float("nan")  # a skipped step does not count
    for step, loss in enumerate([10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 5.0, nan, 5.5, 5.5, 5.0, 4.9], start=1):
        stage.observe(step, loss, None)  # the windows' means are 9, 6, 5.33, and 4.95 from the next step on
        assert stage.switch_step is None
        state = json.loads(json.dumps(stage.state()))
        stage = Stage(config_of(folder, **settings), state)  # a resumed attempt remembers the windows
    stage.observe(13, 4.95, None)
    assert stage.switch_step == 13


def test_layers_that_disagree_end_the_stage(runtime: Any, folder: Path):
    stage = stage_of(folder, switch="gradient_correlation", correlation_checks=2)
    agree, half, apart = [0.9, 0.6, 0.7], [0.4, 0.6, 0.7], [0.4, 0.1, 0.9]
    for step, correlations in enumerate([agree, apart, half, apart, [float("nan")] * 3, None], start=1):
        stage.observe(step, 1.0, correlations)
        assert stage.switch_step is None
    stage.observe(7, 1.0, apart)
    assert stage.switch_step == 7


def test_pairs_of_different_groups_do_not_count(runtime: Any, folder: Path):
    stage = stage_of(folder, switch="gradient_correlation", correlation_checks=1, num_groups=2)
    stage.observe(1, 1.0, [0.9, -1.0, 0.4])
    assert stage.switch_step is None
    stage.observe(2, 1.0, [0.4, 1.0, 0.4])
    assert stage.switch_step == 2


@pytest.mark.parametrize("switch", ["loss_plateau", "gradient_correlation"])
def test_no_rule_outlasts_the_last_step_of_the_stage(runtime: Any, folder: Path, switch: str):
    stage = stage_of(folder, switch=switch)
    for step in range(1, 51):
        assert stage.switch_step is None
        stage.observe(step, 1.0 / step, [0.9, 0.9, 0.9])
    assert stage.switch_step == 50


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"switch_step": 4}, r"switch_step 4 is not before the end of the run, m6.training.total_steps 4"),
        ({}, r"m6.pseudo_to_real.switch_step: missing"),
        ({"switch_step": 1, "num_groups": 4}, r"num_groups 4 is not below the 4 layers"),
        ({"switch_step": 1, "shared": ["ffn"]}, r"shared \['ffn'\] names no part that a layer of this model has"),
        ({"switch_step": 1, "shared": []}, r"m6.pseudo_to_real.shared: "),
        ({"switch_step": 1, "shared": ["atention"]}, r"m6.pseudo_to_real.shared.0: .*'attention'.*found 'atention'"),
        ({"switch_step": 1, "swich": "step"}, r'm6.pseudo_to_real.swich: unknown key; did you mean "switch"'),
        ({"switch_step": 1, "rewarm_steps": 3}, r'rewarm_steps belongs to "learning_rate": "rewarm"'),
        ({"switch_step": 1, "learning_rate": "rewarm"}, r'rewarm_steps belongs to "learning_rate": "rewarm"'),
    ],
)
def test_wrong_settings_name_the_key(folder: Path, settings: dict[str, Any], expected: str):
    with pytest.raises(UserError, match=expected):
        parse_config(tiny_document(folder, **MODEL, m6__pseudo_to_real=settings))


def test_layers_that_differ_in_shape_cannot_share(folder: Path):
    frequency = {"m6__model__moe_layer_frequency": 2}
    expected = r"layers 0 and 1 are in one group but differ in shape: .* dense, .* a mixture of experts \(moe_layer_"
    with pytest.raises(UserError, match=expected):
        parse_config(tiny_document(folder, **MODEL, m6__pseudo_to_real={"switch_step": 1}, **frequency))
    settings = {"switch_step": 1, "shared": ["attention", "norms"]}
    parse_config(tiny_document(folder, **MODEL, m6__pseudo_to_real=settings, **frequency))
