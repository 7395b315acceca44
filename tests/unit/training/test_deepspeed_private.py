"""DeepSpeed has each private name that is used, and one file uses them."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.runs.processes import start
from m6.training.deepspeed_private import _SCALE_STATE
from tests.fixtures.process_group import no_process_group_left

ROOT = Path(__file__).resolve().parents[3] / "m6"
FILE = ROOT / "training" / "deepspeed_private.py"
PUBLIC = {"optimizer"}


def attributes(file: Path, *owners: str) -> set[str]:
    """Names of attributes in a file; with ``owners`` of the variables with these names only."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if not owners or (isinstance(node.value, ast.Name) and node.value.id in owners)}


OF_OPTIMIZER = sorted(attributes(FILE, "zero"))
OF_PARAMETERS = ["ds_tensor", "ds_numel", "ds_shape"]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[int, Any]]:
    """ZeRO stage -> an engine of DeepSpeed's in which we have replaced nothing."""
    with no_process_group_left():
        start()
        import deepspeed

        made = {}
        for stage in (1, 3):
            module = torch.nn.Linear(4, 4)
            config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
            optimizer = torch.optim.AdamW(module.parameters())
            made[stage], *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=config, dist_init_required=False
            )
        yield made
        for engine in made.values():
            engine.destroy()


@pytest.mark.parametrize("name", OF_OPTIMIZER)
def test_the_optimizer_has_the_name(engines: dict[int, Any], name: str):
    assert any(hasattr(engine.optimizer, name) for engine in engines.values())


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_a_parameter_of_stage_3_has_the_name(engines: dict[int, Any], name: str):
    assert all(hasattr(parameter, name) for parameter in engines[3].module.parameters())


@pytest.mark.parametrize("name", [*_SCALE_STATE, "dynamic", "raise_error_at_min_scale", "update_scale"])
def test_the_loss_scaler_has_the_name(name: str):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    arguments = inspect.signature(DynamicLossScaler).parameters
    assert hasattr(DynamicLossScaler(**dict.fromkeys(arguments, 1)), name)


@pytest.mark.parametrize("name", ["_get_expert_parallel_group", "_get_expert_data_parallel_group"])
def test_a_process_group_has_the_name(name: str):
    from deepspeed.utils import groups

    assert callable(getattr(groups, name))
    assert isinstance(groups._EXPERT_PARALLEL_GROUP, dict)
    assert isinstance(groups._EXPERT_DATA_PARALLEL_GROUP_RANKS, dict)


def test_no_other_file_uses_these_names():
    private = {*OF_OPTIMIZER, *OF_PARAMETERS} - PUBLIC
    assert len(private) > 30
    users = {file: attributes(file) & private for file in ROOT.rglob("*.py") if file != FILE}
    assert not {str(file): names for file, names in users.items() if names}
