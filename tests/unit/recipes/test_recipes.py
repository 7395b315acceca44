"""The recipes of CONTRIBUTING.md: their patches apply to the code, touch few files, and do what the page says."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.pages import ROOT, blocks, execute

RECIPES = (
    "Adding a routing option",
    "Adding an objective",
    "Adding a configuration key",
    "Adding a data source",
)
MAX_SOURCE_FILES = 3


def copy_of_the_code(folder: Path) -> Path:
    code = folder / "code"
    for package in ("m6", "moe", "offload", "native", "tests/fixtures"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    return code


def apply(patch: str, code: Path) -> list[str]:
    """Applies a patch to a folder; the files that it touches."""
    # A ceiling, since git would otherwise look for a repository above the folder and skip files outside of it.
    environment = {"GIT_CEILING_DIRECTORIES": str(code.parent), "PATH": "/usr/bin:/bin"}
    command = ["git", "apply", "--verbose", "-"]
    ended = subprocess.run(command, cwd=code, input=patch, text=True, capture_output=True, env=environment)
    assert ended.returncode == 0, f"the patch of the page no longer applies: {ended.stderr}"
    return [line.removeprefix("+++ b/") for line in patch.splitlines() if line.startswith("+++ ")]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_does_what_it_says(recipe: str, tmp_path: Path):
    patch, proof = blocks("CONTRIBUTING.md", recipe)
    assert patch.language == "diff"
    code = copy_of_the_code(tmp_path)
    files = apply(patch.text, code)
    assert 1 <= len(files) <= MAX_SOURCE_FILES
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "configs").symlink_to(ROOT / "configs")
    execute(proof, folder, code)
