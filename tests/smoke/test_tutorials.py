"""The tutorials are executed: their bash and Python blocks, in order. The whole Slurm one is in tests/slurm."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.forked_command import forked_m6
from tests.fixtures.pages import COMMAND, ROOT, Block, blocks, execute
from tests.fixtures.tiny_run import write_tiny_config

TUTORIALS = "docs/tutorials"


def follow(tutorial: str, folder: Path, code: Path = ROOT, command: str = COMMAND) -> None:
    """Executes a tutorial's blocks in ``folder``; a patch is saved under the name that the page gives it."""
    for block in blocks(f"{TUTORIALS}/{tutorial}.md"):
        if block.language == "diff":
            (folder / "token_deletion.patch").write_text(block.text, encoding="utf-8")
        elif block.language in ("bash", "python"):
            execute(block, folder, code, command=command, GIT_CEILING_DIRECTORIES=str(folder.parent))


@pytest.fixture(scope="module")
def command() -> Iterator[str]:
    with forked_m6() as command:
        yield command


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory, command: str) -> Path:
    """A folder in which the first tutorial was followed: the others begin with its data and its run."""
    folder = tmp_path_factory.mktemp("tutorials")
    (folder / "configs").symlink_to(ROOT / "configs")
    follow("first_run", folder, command=command)
    return folder


@pytest.mark.slow
def test_the_first_run(first_run: Path):
    assert (first_run / "runs" / "tour" / "curves.png").exists()
    assert (first_run / "runs" / "tour_hf" / "config.json").exists()
    assert (first_run / "runs" / "two" / "DONE").exists()


@pytest.mark.slow
def test_own_pictures_and_texts(first_run: Path, command: str):
    follow("own_data", first_run, command=command)
    report = (first_run / "runs" / "own" / "report.md").read_text(encoding="utf-8")
    assert "image_captioning" in report
    assert "language_modelling" in report
    assert (first_run / "runs" / "own_hf" / "config.json").exists()
    assert (first_run / "runs" / "own_drawing.png").exists()


@pytest.mark.slow
def test_a_new_objective(first_run: Path, tmp_path: Path):
    code = tmp_path / "code"
    for package in ("m6", "moe", "offload", "native", "configs"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    (code / "data").symlink_to(first_run / "data")
    follow("objective", code, code)


@pytest.mark.slow
def test_the_submission_of_the_slurm_tutorial(tmp_path: Path):
    """Without Slurm: the job's description is the one that is shipped, and the dry run prints a command of sbatch."""
    description, submission, *_ = blocks(f"{TUTORIALS}/slurm.md")
    job = json.loads(description.text)
    assert job == json.loads((ROOT / "configs" / "jobs" / "cpu_2x1.json").read_text(encoding="utf-8"))
    jobs = tmp_path / "configs" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "cpu_2x1.json").write_text(json.dumps({**job, "shared_folders": [str(tmp_path)]}), encoding="utf-8")
    write_tiny_config(tmp_path / "configs", "m6_smoke.json", train_batch_size=16)
    dry_run = next(line for line in submission.text.splitlines() if line.endswith("--dry-run"))
    printed = execute(Block("bash", dry_run), tmp_path)
    assert printed.startswith("sbatch ")
    assert "--nodes=2" in printed
    assert not (tmp_path / "runs").exists()
