"""The order of imports between the folders of ``offload``."""

import ast
from pathlib import Path

import pytest

import offload

ROOT = Path(offload.__file__).parent
FOLDERS = {
    "devices": set(),
    "optimizer": set(),
    "memory": {"devices", "optimizer"},
    "plan": {"devices", "optimizer", "memory"},
    "runtime": {"devices", "optimizer", "memory", "plan"},
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_lower_ones(folder: str) -> None:
    found = set()
    for file in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("offload"):
                found.add(str(node.module).removeprefix("offload").strip(".").split(".")[0])
    assert found - {folder} <= FOLDERS[folder]


def test_every_folder_has_its_place() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(FOLDERS)
