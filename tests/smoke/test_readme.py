"""The README's commands do what it says, and its links lead somewhere."""

import subprocess
from pathlib import Path

import pytest
from PIL import Image

from m6.generation.grid import GAP
from tests.fixtures.pages import ROOT, Block, blocks, execute, missing_links

# Commands that are this suite itself, or that take minutes; the smoke script has a shorter run of its own below.
ELSEWHERE = ("bash scripts/test.sh", "bash scripts/smoke.sh")
PAGES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()


@pytest.mark.slow
def test_the_smoke_script(tmp_path: Path):
    command = f"bash {ROOT}/scripts/smoke.sh {tmp_path}/run --set m6.training.total_steps=70"
    assert "2 attempts" in execute(Block("bash", command), ROOT)
    assert (tmp_path / "run" / "DONE").read_text().strip() == "70"


@pytest.mark.slow
def test_the_commands_of_the_readme(tmp_path: Path):
    for folder in ("configs", "models"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    commands = [block for block in blocks("README.md") if block.language == "bash"]
    assert len(commands) == 4
    plan, draw = (execute(block, tmp_path) for block in commands if not block.text.startswith(ELSEWHERE))
    assert "128" in plan
    assert "circles.png" in draw
    with Image.open(tmp_path / "circles.png") as grid:
        assert grid.size == (3 * 64 + 2 * GAP, 3 * 64 + 2 * GAP)  # eight pictures of one caption, in three rows


@pytest.mark.parametrize("page", PAGES or ["README.md"])
def test_links_lead_somewhere(page: str):
    assert not missing_links(page)
