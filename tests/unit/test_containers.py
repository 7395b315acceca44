"""The recipes of containers: what they copy and name is there, and they build where there is a builder."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, DEFINITION, IGNORED, INSTALL = (
    (ROOT / "containers" / name).read_text(encoding="utf-8")
    for name in ("Dockerfile", "m6.def", "Dockerfile.dockerignore", "install.sh")
)
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def copied_by_docker() -> set[str]:
    lines = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    return {source.rstrip("/") for sources in lines for source in sources}


def copied_by_apptainer() -> dict[str, str]:
    [section] = re.findall(r"^%files\n((?: +.+\n)+)", DEFINITION, re.MULTILINE)
    return dict(line.split() for line in section.splitlines())


def test_both_copy_what_the_package_is_built_from():
    copied = copied_by_docker()
    assert {source: f"/opt/m6-recipes/{source}" for source in copied} == copied_by_apptainer()
    assert copied == {line[1:] for line in IGNORED.splitlines() if line.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
    [packages] = re.findall(r"^include = \[(.*)\]", PROJECT, re.MULTILINE)
    assert {name.strip('"* ') for name in packages.split(",")} <= copied
    assert {"configs", "scripts/constraints.txt", "containers/install.sh"} <= copied
    extras = set(re.findall(r"\.\[([\w,]+)\]", INSTALL)[0].split(","))
    assert all(f"\n{extra} = [" in PROJECT for extra in extras)


def test_both_name_the_versions_of_the_project():
    [base] = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert f"\nFrom: {base}\n" in DEFINITION
    constraints = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8")
    python = re.findall(r"\(Python ([\d.]+)\)", constraints)
    assert re.findall(r"^python:([\d.]+)-", base) == python
    [torch] = re.findall(r"^torch==([\d.]+)$", constraints, re.MULTILINE)
    for recipe in (DOCKERFILE, DEFINITION):
        assert re.findall(r"TORCH_VERSION=([\d.]+)\n", recipe) == [torch]
    script = (ROOT / "scripts" / "environment.sh").read_text(encoding="utf-8")
    assert re.findall(r"^torch_version=(\S+)$", script, re.MULTILINE) == [torch]


def builder() -> str | None:
    """The first of the known builders that works here."""
    for name in ("docker", "podman", "buildah"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, timeout=60).returncode == 0:
            return name
    return None


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_image_builds_and_plans():
    program = builder()
    if program is None:
        pytest.skip("no builder of images works here")
    tag = "m6-recipes-test"
    subprocess.run([program, "build", "--file", "containers/Dockerfile", "--tag", tag, "."], cwd=ROOT, check=True)
    if program != "buildah":
        command = [program, "run", "--rm", tag, "plan", "m6_smoke", "--cluster", "cpu_laptop"]
        assert "CPU laptop" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("apptainer") is None, reason="Apptainer is not installed")
def test_apptainer_builds_and_plans(tmp_path: Path):
    image = tmp_path / "m6.sif"
    subprocess.run(["apptainer", "build", image, "containers/m6.def"], cwd=ROOT, check=True)
    command = ["apptainer", "run", image, "plan", "m6_smoke", "--cluster", "cpu_laptop"]
    assert "CPU laptop" in subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
