"""The README's commands do what it says, and its links lead somewhere."""

import subprocess
from pathlib import Path

import pytest

from tests.fixtures.pages import ROOT, Block, blocks, execute, missing_links

# Commands that are this suite itself, or that take minutes; the smoke script has a shorter run of its own below.
ELSEWHERE = ("bash scripts/test.sh", "bash scripts/smoke.sh")
PAGES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_smoke_script(tmp_path: Path):
    command = f"bash {ROOT}/scripts/smoke.sh {tmp_path}/run --set m6.training.total_steps=70"
    assert "2 attempts" in execute(Block("bash", command), ROOT)
    assert (tmp_path / "run" / "DONE").read_text().strip() == "70"


@pytest.mark.slow
def test_the_commands_of_the_readme(tmp_path: Path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    commands = [block for block in blocks("README.md") if block.language == "bash"]
    assert len(commands) == 3
    for block in commands:
        if not block.text.startswith(ELSEWHERE):
            assert "128" in execute(block, tmp_path)


@pytest.mark.parametrize("page", PAGES or ["README.md"])
def test_links_lead_somewhere(page: str):
    assert not missing_links(page)
