"""DeepSpeed has each private name that is used, and one file uses them."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import parse_config
from m6.runs.processes import start
from m6.training.engine.build import build_engine
from tests.fixtures.process_group import no_process_group_left
from tests.fixtures.tiny_run import tiny_document

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
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Any]]:
    """ZeRO stage -> DeepSpeed's engine of a tiny run."""
    folder = tmp_path_factory.mktemp("private")
    with no_process_group_left():
        runtime = start()
        made = {}
        for stage in (1, 3):
            document = tiny_document(folder, m6__moe=None, zero_optimization={"stage": stage})
            made[stage] = build_engine(parse_config(document), runtime)
        yield {stage: engine._deepspeed for stage, engine in made.items()}
        for engine in made.values():
            engine.release()


@pytest.mark.parametrize("name", OF_OPTIMIZER)
def test_the_optimizer_has_the_name(engines: dict[int, Any], name: str):
    assert any(hasattr(engine.optimizer, name) for engine in engines.values())


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_a_parameter_of_stage_3_has_the_name(engines: dict[int, Any], name: str):
    assert all(hasattr(parameter, name) for parameter in engines[3].module.parameters())


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
