"""scripts/test.sh: what it hands to pytest, with stand-ins for the environment and the tools; what scripts share."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test.sh"
OWN = ["--numprocesses", "logical", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder"]


def calls(folder: Path, *arguments: str) -> list[list[str]]:
    """The arguments of pytest in each of the calls."""
    shutil.copy(SCRIPT, folder / "test.sh")
    (folder / "environment.sh").write_text(
        f"root={folder}\nsay() {{ :; }}\nmake_environment() {{ :; }}\ninstall_slurm() {{ :; }}\n"
    )
    (folder / "pre-commit").write_text('#!/bin/sh\n[ "$2" != mypy ] || [ ! -e wrong_types ]\n')
    (folder / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@" -- >>calls\n')
    for program in ("pre-commit", "python"):
        (folder / program).chmod(0o755)
    # Nothing else of this machine, which may have a GPU.
    for program in ("bash", "cat", "dirname", "mktemp", "rm", "sh"):
        (folder / program).symlink_to(shutil.which(program) or program)
    environment = {**os.environ, "PATH": str(folder)}
    subprocess.run(["bash", folder / "test.sh", *arguments], env=environment, check=True, timeout=60)
    return [call.splitlines()[2:] for call in (folder / "calls").read_text().split("--\n")[:-1]]


@pytest.mark.parametrize(
    ("arguments", "first", "second"),
    [
        (
            [],
            [*OWN, "-m", "not slurm and not gpu and not nightly"],
            ["-rs", "-m", "slurm and not nightly", "tests/slurm"],
        ),
        (
            ["-m", "not slow"],
            [*OWN, "-m", "not slurm and not gpu and not nightly and (not slow)"],
            ["-rs", "-m", "slurm and not nightly and (not slow)", "tests/slurm"],
        ),
        (
            ["tests/unit", "-mgpu or slow", "-k", "a b"],
            [*OWN, "-m", "not slurm and not gpu and not nightly and (gpu or slow)", "tests/unit", "-k", "a b"],
            ["-rs", "-m", "slurm and not nightly and (gpu or slow)", "tests/unit", "-k", "a b"],
        ),
    ],
    ids=["none", "marks", "all kinds"],
)
def test_a_choice_of_marks_narrows_that_of_the_script(
    tmp_path: Path, arguments: list[str], first: list[str], second: list[str]
):
    assert calls(tmp_path, *arguments) == [first, second]


def test_a_machine_with_a_gpu_runs_the_tests_of_a_gpu_too(tmp_path: Path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    found = calls(tmp_path, "--fast", "tests/gpu")
    assert found[1:] == [["--numprocesses", "4", "-m", "gpu and not nightly and not slow", "tests/gpu"]]


def test_all_adds_the_nightly_tests(tmp_path: Path):
    assert calls(tmp_path, "--all") == [[*OWN, "-m", "not slurm and not gpu"], ["-rs", "-m", "slurm", "tests/slurm"]]


def test_wrong_types_fail_after_the_tests(tmp_path: Path):
    (tmp_path / "wrong_types").touch()
    with pytest.raises(subprocess.CalledProcessError):
        calls(tmp_path)
    assert (tmp_path / "calls").read_text().startswith("-m\npytest\n")


def test_the_fast_lane_leaves_out_slow_tests_and_slurm(tmp_path: Path):
    assert calls(tmp_path, "--fast", "tests/unit") == [
        [*OWN, "-m", "not slurm and not gpu and not nightly and not slow", "tests/unit"]
    ]


def test_a_script_ends_after_a_training_that_was_stopped(tmp_path: Path):
    """Such a training ends with 0, and parts after it would go on from its half."""
    script = f"set -e; source {SCRIPT.parent / 'environment.sh'}; finished {tmp_path / 'DONE'}; echo goes on"
    stopped = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (stopped.returncode, stopped.stdout) == (1, "")
    assert "the training was stopped; run the same command again" in stopped.stderr
    (tmp_path / "DONE").touch()
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout == "goes on\n"


def test_an_environment_keeps_compiled_modules(tmp_path: Path):
    script = (
        f"source {SCRIPT.parent / 'environment.sh'}; mkdir -p $venv; cat $root/pyproject.toml "
        "$root/scripts/constraints.txt | cksum >$venv/.installed-dev; make_environment data; "
        "echo ${PYTHONDONTWRITEBYTECODE-kept}"
    )
    environment = {**os.environ, "M6_VENV": str(tmp_path / "venv"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "kept\n"


@pytest.mark.parametrize(
    ("gpu", "enabled"),
    [("echo 7.5", False), ("echo 8.0", True), ("printf '9.0\\n9.0\\n'", True), ("echo 12.0", True), ("exit 9", False)],
)
def test_bf16_where_a_gpu_multiplies_it(tmp_path: Path, gpu: str, enabled: bool):
    """On a processor that does not: grep finds nothing."""
    for program, body in (("nvidia-smi", gpu), ("grep", "exit 1")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / program).chmod(0o755)
    script = f'set -euo pipefail; source {SCRIPT.parent / "environment.sh"}; choose_precision; echo "${{precision[1]}}"'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == f"torch_autocast.enabled={str(enabled).lower()}\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("", 9), ("--long FOLDER", 9), ("FOLDER --long", 2), ("--pixels 65", 2), ("--pixels", 2), ("--wide", 2)],
)
def test_the_demonstration_refuses_what_it_would_ignore(tmp_path: Path, arguments: str, code: int):
    shutil.copy(SCRIPT.parent / "text_to_image.sh", tmp_path)
    (tmp_path / "environment.sh").write_text(f"root={tmp_path}\nmake_environment() {{ exit 9; }}\n")
    command = ["bash", tmp_path / "text_to_image.sh", *arguments.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert (f"[FOLDER]; found {arguments}\n" in ended.stderr) == (code == 2)
