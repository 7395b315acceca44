"""The README's commands do what it says: every bash and Python block is run, in order, in this checkout."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Commands that are this suite itself, or that take minutes; the smoke script has a shorter run of its own below.
ELSEWHERE = ("bash scripts/test.sh", "bash scripts/smoke.sh")
ENVIRONMENT = {
    **os.environ,
    "M6_VENV": sys.prefix,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def run(command: list[str], folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.timeout(1200)
def test_the_smoke_script(tmp_path: Path):
    output = run(
        ["bash", str(ROOT / "scripts" / "smoke.sh"), str(tmp_path / "run"), "--set", "m6.training.total_steps=70"], ROOT
    )
    assert "2 attempts" in output
    assert (tmp_path / "run" / "DONE").read_text().strip() == "70"


@pytest.mark.timeout(1200)
def test_the_commands_of_the_readme(tmp_path: Path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    ran = 0
    for language, text in blocks():
        commands = (
            [["python", "-c", text]] if language == "python" else [shlex.split(line) for line in text.splitlines()]
        )
        for command in commands:
            if shlex.join(command).startswith(ELSEWHERE):
                continue
            run(command, tmp_path)
            ran += 1
    assert ran >= 10
    assert (tmp_path / "runs" / "tour_hf" / "config.json").exists()
    assert (tmp_path / "runs" / "two" / "DONE").exists()


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert targets
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert not missing
