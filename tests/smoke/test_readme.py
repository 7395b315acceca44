"""The README's commands do what it says, and its links lead somewhere."""

import subprocess
from pathlib import Path

import pytest
from PIL import Image

from m6.generation.grid import GAP
from tests.fixtures.pages import ROOT, Block, blocks, execute, missing_links

# Commands that are this suite itself, or that take minutes; the smoke script has a shorter run of its own below.
ELSEWHERE = ("bash scripts/test.sh", "bash scripts/smoke.sh")
PAPERS = [
    "2103.00823",
    "2105.15082",
    "2110.03888",
    "2108.05818",
    "2011.09208",
    "2302.00247",
    "2004.10856",
    "2012.12544",
    "2006.09503",
    "2102.07988",
    "2105.14450",
    "2408.08586",
    "2208.14228",
    "1808.04357",
    "2008.08445",
    "1807.11205",
    "1903.06934",
    "2010.05680",
    "1611.09441",
]
PAGES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()


@pytest.mark.slow
def test_the_smoke_script(tmp_path: Path):
    """With fewer steps, and a kill as in the whole run: after the switch and a checkpoint."""
    changes = (
        *("training.total_steps=14", "schedule.warmup_steps=4", "pseudo_to_real.switch_step=5"),
        *("checkpoint.interval_steps=5", "logging.interval_steps=2"),
    )
    command = f"bash {ROOT}/scripts/smoke.sh {tmp_path}/run {' '.join(f'--set m6.{change}' for change in changes)}"
    assert "2 attempts" in execute(Block("bash", command), ROOT, M6_SMOKE_KILL_AT="6")
    assert (tmp_path / "run" / "DONE").read_text().strip() == "14"


@pytest.mark.slow
def test_the_commands_of_the_readme(tmp_path: Path):
    for folder in ("configs", "models"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    activate = tmp_path / ".venv" / "bin" / "activate"  # which the smoke script makes; this environment is active
    activate.parent.mkdir(parents=True)
    activate.touch()
    commands = [block for block in blocks("README.md") if block.language == "bash"]
    assert len(commands) == 3
    [said] = [execute(block, tmp_path) for block in commands if not block.text.startswith(ELSEWHERE)]
    assert "on 128 devices of 128 x H200" in said
    assert "circles.png" in said
    with Image.open(tmp_path / "circles.png") as grid:
        assert grid.size == (3 * 64 + 2 * GAP, 3 * 64 + 2 * GAP)  # eight pictures of one caption, in three rows


def test_the_readme_is_short_and_names_every_paper():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900
    assert text.index("```bash") < 600, "the first command stands at the top"
    for paper in PAPERS:
        assert f"(https://arxiv.org/abs/{paper})" in text, paper


@pytest.mark.parametrize("page", PAGES or ["README.md"])
def test_links_lead_somewhere(page: str):
    assert not missing_links(page)
