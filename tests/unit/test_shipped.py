"""Shipped files by name, from the checkout and from an installed wheel, which holds all that is no Python too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m6.shipped import CONFIGS, shipped_file
from tests.fixtures.command import user_error

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("kind", "name", "file"),
    [
        ("configuration", "m6_smoke", "m6_smoke.json"),
        ("configuration", "text_to_image", "finetune/text_to_image.json"),
        ("configuration", "pipeline", "parallel/pipeline.json"),
        ("image tokenizer", "pictures_64", "image_tokenizer/pictures_64.json"),
        ("cluster", "h100_x128", "clusters/h100_x128.json"),
        ("job", "gpu_1x8", "jobs/gpu_1x8.json"),
        ("corpus recipe", "chinese_text", "corpus/chinese_text.json"),
    ],
)
def test_a_name_is_that_of_a_shipped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, file: str
):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()  # a folder, such as that of a run, is no configuration
    assert shipped_file(Path(name), kind) == CONFIGS / file
    assert (CONFIGS / file).samefile(ROOT / "configs" / file)
    Path(name).rmdir()
    Path(name).write_text("{}")
    assert shipped_file(Path(name), kind) == Path(name)


def test_a_path_is_that_path(tmp_path: Path):
    assert shipped_file(Path("configs/m6_smok.json"), "configuration") == Path("configs/m6_smok.json")
    own = tmp_path / "m6_smoke.json"
    own.write_text("{}")
    assert shipped_file(own, "configuration") == own


JOB, CLUSTER = ["--job", "gpu_1x9"], ["--cluster", "h100_128"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["pretrain", "m6_smok"], 'm6_smok: no such file, and no shipped configuration; did you mean "m6_smoke"?'),
        (["finetune", "text_to_picture", "--init", "x"], 'did you mean "text_to_image"?'),
        (["plan", "m6_100"], 'm6_100: no such file, and no shipped configuration; did you mean "m6_100b"?'),
        (["plan", "m6_100b"], 'h100_128: no such file, and no shipped cluster; did you mean "h100_x128"?'),
        (["train-image-tokenizer", "picture", "--out", "x"], 'no shipped image tokenizer; did you mean "pictures_64"?'),
        (["data", "corpus", "chinese_txt"], 'no shipped corpus recipe; did you mean "chinese_text"?'),
        (["submit", "m6_smoke"], 'gpu_1x9: no such file, and no shipped job; did you mean "gpu_1x8"?'),
        (["pretrain", "b/m6_smoke.json"], 'b/m6_smoke.json: no such file; did you mean the shipped configuration "m6_'),
    ],
)
def test_an_unknown_name_gets_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    assert message in user_error(*command, *{"plan": CLUSTER, "submit": JOB}.get(command[0], []))


@pytest.mark.slow
def test_the_wheel_holds_them(tmp_path: Path):
    """Built without a network, installed into a folder, and used from another one."""
    source, installed, elsewhere = tmp_path / "source", tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for package in ("m6", "moe", "native", "offload", "configs"):
        shutil.copytree(ROOT / package, source / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    run("pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path, source)
    [wheel] = tmp_path.glob("*.whl")
    run("pip", "install", "--no-deps", "--no-index", "--target", installed, wheel)
    shutil.rmtree(source)
    inside = {str(file.relative_to(installed / "m6")) for file in (installed / "m6" / "configs").rglob("*.json")}
    assert inside == {str(file.relative_to(ROOT)) for file in (ROOT / "configs").rglob("*.json")}

    tasks = installed / "m6" / "evaluation" / "harness" / "tasks"
    assert {file.name for file in tasks.iterdir() if file.is_file()} == {"news.yaml", "reviews.yaml", "rows.py"}

    def m6(*arguments: str) -> str:
        return run("m6", *arguments, cwd=elsewhere, PYTHONPATH=str(installed))

    assert m6("--version").startswith("m6-recipes ")
    assert "128 x A100 80 GB" in m6("plan", "m6_100b", "--cluster", "a100_80g_x128")


def run(module: str, *arguments: object, cwd: Path | None = None, **environment: str) -> str:
    """Runs ``python -m MODULE`` and returns what it prints."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, cwd=cwd, env={**os.environ, **environment}
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
