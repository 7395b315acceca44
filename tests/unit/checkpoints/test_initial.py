"""The weights of an exported model whose list of files is damaged, or names files of somebody else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from m6.checkpoints.format import WEIGHT
from m6.checkpoints.initial import ExportedWeights
from m6.errors import UserError

INDEX = "model.safetensors.index.json"


def test_files_that_the_index_names(tmp_path: Path):
    save_file({"a": torch.arange(6.0).view(3, 2)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    target = torch.zeros(3)
    ExportedWeights(tmp_path).read_into("a", WEIGHT, 1, target)
    assert target.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "../private.safetensors"}},
        {"weight_map": {"a": "sub/../../private.safetensors"}},
        {"weight_map": {"a": "{folder}/private.safetensors"}},
        {"weight_map": {"a": ".."}},
        {"weight_map": {"a": 7}},
        {"weight_map": ["a"]},
        {"weight_map": None},
        {},
        [],
        "[" * 100_000,
    ],
)
def test_an_index_that_is_damaged_or_leads_elsewhere(index: Any, tmp_path: Path):
    save_file({"a": torch.zeros(2)}, tmp_path / "private.safetensors")
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    text = index if isinstance(index, str) else json.dumps(index).replace("{folder}", str(tmp_path))
    (folder / INDEX).write_text(text)
    with pytest.raises(UserError, match="not a complete exported model"):
        ExportedWeights(folder)
